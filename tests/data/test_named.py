"""Named data sets: rows in their columns become prompts; what is missing is said."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from huggingface_hub.errors import HTTPError

from draftsmith.data.named import DATA_SETS, is_named, named_prompts, rows_to_prompts
from draftsmith.data.prompts import find_prompts
from draftsmith.errors import DraftsmithError

# One row as each data set has it on the hub, with the columns that are not read.
ROWS = {
    "gsm8k": {"question": "How many?", "answer": "#### 3"},
    "math500": {"problem": "Find $x$.", "solution": "$x=1$", "answer": "1", "subject": "Algebra", "level": 2},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f(x):\n    ...\n", "test": "", "entry_point": "f"},
    "mbpp": {"task_id": 2, "prompt": "Write a function.", "code": "def f(): ...", "test_list": ["assert f()"]},
    "mt-bench": {"prompt": ["First?", "Second?"], "category": "writing", "prompt_id": 81, "reference": []},
    "alpaca": {"instruction": "Sort these.", "input": "3 1 2", "output": "1 2 3", "text": ""},
}


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_local_file_in_the_columns_of_a_data_set(name, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[name]) + "\n" + json.dumps(ROWS[name]) + "\n")
    first, second = find_prompts(f"{name}@{path}", "heldout")
    assert (first.id, second.id) == ("rows-1", "rows-2")
    asked = next(iter(ROWS[name][column] for column in DATA_SETS[name].columns))
    asked = asked[0] if isinstance(asked, list) else asked
    assert asked.rstrip() in first.turns[0]


def test_turns_and_categories():
    (talk,) = rows_to_prompts("mt-bench", [ROWS["mt-bench"]])
    assert (talk.id, talk.turns, talk.category) == ("mt-bench-1", ("First?", "Second?"), "writing")
    assert rows_to_prompts("math500", [ROWS["math500"]])[0].category == "Algebra"
    assert rows_to_prompts("alpaca", [ROWS["alpaca"]])[0].turns == ("Sort these.\n\n3 1 2",)
    assert rows_to_prompts("alpaca", [ROWS["alpaca"] | {"input": ""}])[0].turns == ("Sort these.",)


@pytest.mark.parametrize(
    ("name", "row", "wanted"),
    [
        ("mt-bench", {"prompt": "First?"}, "each a list of texts, the turns"),
        ("mt-bench", {"prompt": []}, "each a list of texts, the turns"),
        ("gsm8k", {"question": ["How many?"]}, "each a text"),
        ("alpaca", {"instruction": "Sort these.", "input": ["3", "1"]}, "each a text"),
    ],
)
def test_a_text_is_no_list_of_turns_nor_a_list_a_text(name, row, wanted):
    with pytest.raises(DraftsmithError, match=rf"column .* the columns of {name} are .*, {wanted}"):
        rows_to_prompts(name, [row])


def test_a_name_without_a_file_after_the_at_sign():
    with pytest.raises(DraftsmithError, match=r"'gsm8k@' names no file after the @; give gsm8k@FILE\.jsonl"):
        find_prompts("gsm8k@", "heldout")


class DatasetsError(Exception):
    """As the package has it: neither an OSError nor a ValueError."""


def datasets_that(load_dataset) -> ModuleType:
    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    module.exceptions = SimpleNamespace(DatasetsError=DatasetsError)
    return module


def test_the_hub_is_asked_through_datasets(monkeypatch):
    asked = []
    module = datasets_that(lambda *path, split: asked.append((*path, split)) or [ROWS["gsm8k"]])
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert named_prompts("gsm8k", "heldout")[0].turns[0].startswith("How many?\nPlease reason step by step")
    assert asked == [("openai/gsm8k", "main", "test")]


@pytest.mark.parametrize("name", DATA_SETS)
def test_what_is_learnt_from_is_not_what_is_measured_on(monkeypatch, name, tmp_path):
    asked = []
    module = datasets_that(lambda *path, split: asked.append(split) or [ROWS[name]])
    monkeypatch.setitem(sys.modules, "datasets", module)
    if name in ("gsm8k", "mbpp"):
        assert len(find_prompts(name, "train")) == 1
        assert asked == ["train"]
        find_prompts(name, "heldout")
        assert asked == ["train", "test"]
        return
    with pytest.raises(DraftsmithError, match=rf"'{name}' is there to measure on.*gsm8k, mbpp.*{name}@FILE\.jsonl"):
        find_prompts(name, "train")
    assert not asked
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROWS[name]) + "\n")
    assert find_prompts(f"{name}@{rows}", "train") == find_prompts(f"{name}@{rows}", "heldout")


BROKEN = DatasetsError("An error occurred")
BROKEN.__cause__ = EOFError("the file ends\n early")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("no route to host"), "no route to host"),
        (ValueError("no split"), "no split"),
        (HTTPError("peer closed connection"), "peer closed connection"),
        (BROKEN, "An error occurred: the file ends early"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_hub_that_does_not_answer_is_said(monkeypatch, error, said):
    def refuse(*path, split):
        raise error

    monkeypatch.setitem(sys.modules, "datasets", datasets_that(refuse))
    with pytest.raises(DraftsmithError, match=rf"'gsm8k' \(openai/gsm8k\).*: {said}; .*gsm8k@FILE"):
        find_prompts("gsm8k", "heldout")


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DraftsmithError, match=r"'gsm8k'.*which cannot be imported.*draftsmith\[data\].*gsm8k@FILE"):
        find_prompts("gsm8k", "heldout")
    with pytest.raises(DraftsmithError, match="data set gsm8k: column 'question' is None"):
        rows_to_prompts("gsm8k", [{"problem": "x"}])
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": ["a", 3]}\n')
    with pytest.raises(DraftsmithError, match=r"rows\.jsonl:1: column 'prompt'"):
        find_prompts(f"mt-bench@{path}", "heldout")
    assert not is_named("gsm9k")
