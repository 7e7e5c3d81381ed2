"""Named data sets through the real package `datasets`, from directories with the files that the hub has of each."""

import json
import socket

import pytest

from draftsmith.data.named import DATA_SETS
from draftsmith.data.prompts import find_prompts
from draftsmith.errors import DraftsmithError

datasets = pytest.importorskip("datasets", reason="needs the package datasets (extra [data] or [interop])")
pytestmark = pytest.mark.interop

TEXT = datasets.Value("string")
TEXTS = datasets.Sequence(TEXT)
NUMBER = datasets.Value("int32")

# Columns of each data set in the split that is read, and the front matter of its README.
COLUMNS = {
    "gsm8k": {"question": TEXT, "answer": TEXT},
    "math500": {
        **dict.fromkeys(("problem", "solution", "answer", "subject"), TEXT),
        "level": datasets.Value("int64"),
        "unique_id": TEXT,
    },
    "humaneval": dict.fromkeys(("task_id", "prompt", "canonical_solution", "test", "entry_point"), TEXT),
    "mbpp": {
        **{"source_file": TEXT, "task_id": NUMBER, "prompt": TEXT, "code": TEXT},
        **{"test_imports": TEXTS, "test_list": TEXTS},
    },
    "mt-bench": {"category": TEXT, "prompt": TEXTS, "reference": TEXTS, "prompt_id": datasets.Value("int64")},
    "alpaca": dict.fromkeys(("instruction", "input", "output", "text"), TEXT),
}
CONFIGS = {"gsm8k": ("socratic", "main"), "humaneval": ("openai_humaneval",), "mbpp": ("full", "sanitized")}
SPLITS = ("prompt", "train", "test", "validation")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Directories of the hub's names in the working directory, a cache of our own, and no way to the hub."""

    def refuse(*_, **__):
        raise OSError("the network was asked")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def cell(kind, text):
    if kind == TEXTS:
        return [f"{text}, first", f"{text}, second"]
    return text if kind == TEXT else len(text)


def rows_of(name, place) -> list[dict]:
    """Three rows that name their column and where they lie."""
    return [
        {column: cell(kind, f"{column} {number} of {place}") for column, kind in COLUMNS[name].items()}
        for number in range(3)
    ]


def lay_out(name, root) -> None:
    """The data set `name` below `root` as the hub has it; every split and configuration has other texts."""
    directory = root / DATA_SETS[name].path
    directory.mkdir(parents=True)
    if name == "math500":
        lines = [json.dumps(row) + "\n" for row in rows_of(name, "test")]
        (directory / "test.jsonl").write_text("".join(lines))
        return
    splits = ("train",) if DATA_SETS[name].split == "train" else SPLITS
    card = "---\nconfigs:\n"
    for config in CONFIGS.get(name, ("data",)):
        card += f"- config_name: {config}\n  data_files:\n"
        for split in splits:
            rows = datasets.Dataset.from_list(
                rows_of(name, f"{config} {split}"), features=datasets.Features(COLUMNS[name])
            )
            (directory / config).mkdir(exist_ok=True)
            rows.to_parquet(directory / config / f"{split}-00000-of-00001.parquet")
            card += f"  - split: {split}\n    path: {config}/{split}-*\n"
    if name in CONFIGS:
        (directory / "README.md").write_text(card + "---\n")
    else:  # the hub's data sets without configurations are found by their files' names, beside others
        (directory / "raw").mkdir()
        (directory / "raw" / "question.jsonl").write_text(json.dumps({"prompt": ["other"]}) + "\n")


TO_LEARN_FROM = [name for name, found in DATA_SETS.items() if found.train_split is not None]


@pytest.mark.parametrize(
    ("name", "use"), [*((name, "heldout") for name in DATA_SETS), *((name, "train") for name in TO_LEARN_FROM)]
)
def test_rows_of_the_right_split_become_prompts(name, use, tmp_path):
    lay_out(name, tmp_path / "here")
    prompts = find_prompts(name, use)
    assert [prompt.id for prompt in prompts] == [f"{name}-{number}" for number in (1, 2, 3)]
    found = DATA_SETS[name]
    split = found.split if use == "heldout" else found.train_split
    place = "test" if name == "math500" else f"{CONFIGS.get(name, ('data',))[-1]} {split}"
    for prompt, row in zip(prompts, rows_of(name, place), strict=True):
        assert list(prompt.turns) == found.turns(row)
        assert len(prompt.turns) == (2 if name == "mt-bench" else 1)
        assert prompt.category == (row[found.category] if found.category else None)
        assert all(f"of {place}" in turn for turn in prompt.turns)


def test_a_file_that_cannot_be_read_is_named_with_its_cause(tmp_path):
    lay_out("math500", tmp_path / "here")
    (tmp_path / "here" / DATA_SETS["math500"].path / "test.jsonl").write_text('{"problem": "x"\n')
    with pytest.raises(DraftsmithError, match=r"'math500' \(HuggingFaceH4/MATH-500\).*JSON parse error.*math500@FILE"):
        find_prompts("math500", "heldout")


def test_a_column_of_another_name_is_named(tmp_path):
    lay_out("math500", tmp_path / "here")
    (tmp_path / "here" / DATA_SETS["math500"].path / "test.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(DraftsmithError, match="data set math500: column 'problem' is None"):
        find_prompts("math500", "heldout")


def test_without_a_network_one_error_says_so(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else the hub's client tries again for long
    with pytest.raises(DraftsmithError, match=r"'gsm8k' \(openai/gsm8k\) cannot be loaded.*gsm8k@FILE") as found:
        find_prompts("gsm8k", "heldout")
    assert "\n" not in str(found.value)
