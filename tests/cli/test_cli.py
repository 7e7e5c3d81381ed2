"""The commands on a tiny target: the whole way, what is skipped, and that every command fails well."""

import json
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.bench.figures import figures
from draftsmith.bench.records import read_report
from draftsmith.cli.app import app
from draftsmith.features.reader import Store
from tests.support.forks import fork
from tests.support.tiny import tiny_model
from tests.support.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

WINDOW = 96
COMMANDS = ("regenerate", "capture", "train", "export", "generate", "bench")


def run(*arguments):
    """Calls a command in this process; returns (exit status, standard output, standard error)."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def command_line(*arguments):
    """The command line, as a process of its own runs it."""
    app(list(arguments))


def fails(*arguments):
    """Calls a command that must fail well: status 1, one message, no traceback; returns the message."""
    status, _, errors = run(*arguments)
    assert status == 1, errors
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors
    return errors


def save_target(directory, **tokenizer):
    tokens = tiny_tokenizer(**tokenizer)
    model = tiny_model("llama", vocab_size=len(tokens) + 1, num_layers=4, max_position_embeddings=WINDOW)
    model.save_pretrained(directory)
    tokens.save_pretrained(directory)
    return directory


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_recipe(directory, target, **sections):
    prompts = [{"id": f"p{i}", "prompt": f"say {word}", "category": "words"} for i, word in enumerate("abcdef")]
    fields = {
        "run": str(directory / "run"),
        "target": {"path": str(target), "device": "cpu"},
        "draft": {
            "algorithm": "dflash",
            "block_size": 4,
            "num_hidden_layers": 1,
            "num_taps": 1,
            "mask_token_id": 0,
            "dtype": "float32",
        },
        "data": {"prompts": str(write_lines(directory / "prompts.jsonl", prompts))},
        "regenerate": {"max_new_tokens": 12},
        "train": {"max_steps": 3, "tokens_per_row": 96, "num_anchors": 8, "eval_share": 0, "device": "cpu"},
        "export": {"which": "last"},
        "bench": {"prompts": str(directory / "prompts.jsonl"), "max_new_tokens": 9, "limit": 3, "batch_size": 2},
    }
    for name, section in sections.items():
        fields[name] = {**fields.get(name, {}), **section} if isinstance(section, dict) else section
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(fields))
    return path


def walked(directory, target):
    """A recipe in `directory` whose run has been walked from end to end."""
    recipe = write_recipe(directory, target)
    for command in ("regenerate", "capture", "train", "export", "bench"):
        status, _, errors = run(command, recipe)
        assert status == 0, errors
    return recipe


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def done(tmp_path_factory, target):
    """A recipe whose run has been walked from end to end."""
    return walked(tmp_path_factory.mktemp("done"), target)


# --- the whole way --------------------------------------------------------------------------------------------------


def test_a_run_holds_what_each_stage_promises(done):
    directory = done.parent / "run"
    answers = [json.loads(line) for line in (directory / "answers.jsonl").read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [f"p{i}" for i in range(6)]
    assert all(answer["messages"][-1]["role"] == "assistant" for answer in answers)
    assert len(Store.open(directory / "features")) == 6
    assert (directory / "draft" / "model.safetensors").is_file()
    report = read_report(directory / "bench.json")
    found = figures(report, report.drafts[0], 2)
    assert found.equal_share == 1.0
    assert found.prompts == 3
    assert "<svg" in (directory / "bench.html").read_text()
    assert len((directory / "bench.jsonl").read_text().splitlines()) > 6


def test_generate_speculative_equals_plain(done):
    asked = ("-p", "say g", "-p", "say hh", "--max-new-tokens", 15)
    status, speculative, notes = run("generate", done, *asked)
    assert status == 0
    assert "accept length" in notes
    status, plain, notes = run("generate", done, *asked, "--plain")
    assert status == 0
    assert "accept length" not in notes
    assert speculative == plain
    assert len(speculative.strip().split("\n\n")) == 2


def test_compare_and_tune(done, tmp_path):
    report, tuned = done.parent / "run" / "bench.json", tmp_path / "tuned.json"
    status, shown, _ = run("compare", report, report)
    assert status == 0
    assert "noise" in shown
    assert "cannot be read" in fails("compare", report, tmp_path / "absent.json")
    asked = ("--block-size", 2, "--out", tuned, "bench.limit=2", "bench.max_new_tokens=6")
    status, _, notes = run("tune", done, *asked)
    assert status == 0, notes
    assert "blocks of 2, 1 proposals" in notes
    question = ("-p", "say g", "--max-new-tokens", 8)
    assert run("generate", done, *question, "--tuned", tuned)[1] == run("generate", done, *question, "--plain")[1]
    both = ("--draft", done.parent / "run" / "draft", "--draft", tmp_path)
    assert "is for one draft" in fails("bench", done, *both, "--tuned", tuned)


def test_inspect_tells_directories_apart(done):
    directory = done.parent / "run"
    shown = {name: run("inspect", directory / name)[1] for name in ("features", "train", "draft", "")}
    assert "6" in shown["features"]
    assert "bfloat16" in shown["features"]
    assert "step 3" in shown["train"]
    assert "zlab" in shown["draft"]
    assert "float32" in shown["draft"]
    files = ("answers.jsonl", "bench.json", "bench.jsonl", "bench.html", "tuned.json")
    assert [name for name in (*files, "features", "train", "draft") if name not in shown[""]] == ["tuned.json"]
    (directory / "tuned.json").write_text("{}")
    assert "tuned.json" in run("inspect", directory)[1]
    (directory / "tuned.json").unlink()


def test_training_goes_on_to_more_steps(tmp_path, target):
    recipe = write_recipe(tmp_path, target)
    for command in ("regenerate", "capture", "train"):
        assert run(command, recipe)[0] == 0
    assert "train.max_steps: 3 then, 5 now" in fails("train", recipe, "train.max_steps=5")
    status, _, errors = run("train", recipe, "train.max_steps=5", "--resume")
    assert status == 0, errors
    assert "step 5" in run("inspect", tmp_path / "run" / "train")[1]


# --- failing well ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_recipe(command, tmp_path):
    assert "nowhere.yaml" in fails(command, tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_key(command, tmp_path, target):
    message = fails(command, write_recipe(tmp_path, target), "train.max_step=3")
    assert "unknown key `max_step` in section `train`; did you mean `max_steps`?" in message


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_type(command, tmp_path, target):
    assert "train.lr is 'fast'" in fails(command, write_recipe(tmp_path, target), "train.lr=fast")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_algorithm(command, tmp_path, target):
    message = fails(command, write_recipe(tmp_path, target), "draft.algorithm=dflush")
    assert "dflush" in message
    assert "dflash" in message


@pytest.mark.parametrize("command", ["regenerate", "bench"])
@pytest.mark.parametrize("content", [None, ""], ids=["missing", "empty"])
def test_prompts_that_are_missing_or_empty(command, content, done, tmp_path):
    prompts = tmp_path / "none.jsonl"
    if content is not None:
        prompts.write_text(content)
    key = {"regenerate": "data.prompts", "bench": "bench.prompts"}[command]
    assert "none.jsonl" in fails(command, done, f"{key}={prompts}")


@pytest.mark.parametrize("content", [None, ""], ids=["missing", "empty"])
def test_conversations_that_are_missing_or_empty(content, tmp_path, target):
    conversations = tmp_path / "none.jsonl"
    if content is not None:
        conversations.write_text(content)
    recipe = write_recipe(tmp_path, target)
    assert "none.jsonl" in fails("capture", recipe, f"data.conversations={conversations}")


def test_stages_out_of_order_say_what_comes_first(tmp_path, target):
    recipe = write_recipe(tmp_path, target)
    assert "draftsmith regenerate" in fails("capture", recipe)
    assert "capture" in fails("train", recipe)
    assert "train" in fails("export", recipe)
    assert "draftsmith export" in fails("bench", recipe)
    assert "draftsmith export" in fails("generate", recipe, "-p", "x")


def test_no_prompts_named(tmp_path, target):
    assert "data.prompts" in fails("regenerate", write_recipe(tmp_path, target, data={"prompts": None}))


def test_a_target_that_is_not_there(tmp_path, target):
    recipe = write_recipe(tmp_path, target)
    assert str(tmp_path / "absent") in fails("regenerate", recipe, f"target.path={tmp_path / 'absent'}")


def test_a_target_without_a_chat_template(tmp_path):
    bare = save_target(tmp_path / "bare", chat_template=False)
    message = fails("regenerate", write_recipe(tmp_path, bare))
    assert "chat template" in message
    assert "data.chat_template" in message


def test_a_target_without_a_tokenizer(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "silent")
    assert "tokenizer" in fails("regenerate", write_recipe(tmp_path, tmp_path / "silent"))


@pytest.mark.parametrize("command", ["regenerate", "bench", "generate"])
def test_a_prompt_longer_than_the_window(command, done, tmp_path):
    long = "x" * (WINDOW + 10)
    file = write_lines(tmp_path / "long.jsonl", [{"prompt": long}])
    arguments = {
        "regenerate": [f"data.prompts={file}", "--fresh", f"run={tmp_path / 'run'}"],
        "bench": [f"bench.prompts={file}"],
        "generate": ["-p", long],
    }[command]
    assert f"window is {WINDOW} tokens" in fails(command, done, *arguments)


def test_a_store_for_another_draft_is_refused_before_training(tmp_path, target):
    recipe = write_recipe(tmp_path, target)
    for command in ("regenerate", "capture"):
        assert run(command, recipe)[0] == 0
    message = fails("train", recipe, "draft.target_layer_ids=[0,2]", "draft.num_taps=null")
    assert "tap_ids: the store has [2], the draft needs [0, 2]" in message


def test_a_draft_directory_that_is_not_there(done, tmp_path):
    assert "absent" in fails("bench", done, "--draft", tmp_path / "absent")
    assert "absent" in fails("generate", done, "-p", "x", "--draft", tmp_path / "absent")
    assert "absent" in fails("tune", done, "--draft", tmp_path / "absent")
    draft = done.parent / "run" / "draft"
    assert f"the draft {draft} is named twice" in fails("bench", done, "--draft", draft, "--draft", draft)


def test_an_empty_prompt_is_refused(done):
    assert "a prompt is empty" in fails("generate", done, "-p", "one", "-p", " ")


def test_sampling_options_out_of_range(done):
    assert "temperature is -1.0; it needs a number >= 0" in fails("generate", done, "-p", "x", "--temperature", -1)
    assert "num_proposals is 99" in fails("generate", done, "-p", "x", "engine.num_proposals=99")
    assert "no decoding options of its own; remove speed" in fails(
        "generate", done, "-p", "x", "engine.proposer.speed=9"
    )
    assert "max_new_tokens" in fails("generate", done, "-p", "x", "--max-new-tokens", 0)


def test_inspect_of_what_is_nothing(tmp_path):
    assert "no directory" in fails("inspect", tmp_path / "absent")
    assert "none of draftsmith's directories" in fails("inspect", tmp_path)


def test_usage_errors_keep_their_status():
    assert run("train")[0] == 2
    assert run("trian")[0] == 2


# --- interruption ---------------------------------------------------------------------------------------------------


def test_an_interrupted_training_is_kept_and_goes_on(tmp_path, target):
    recipe = write_recipe(tmp_path, target, track={"every": 1, "tensorboard": False})
    for command in ("regenerate", "capture"):
        assert run(command, recipe)[0] == 0
    said = tmp_path / "said"
    process = fork(command_line, "train", str(recipe), "train.max_steps=100000", said=said)
    metrics = tmp_path / "run" / "train" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 3):
        assert process.is_alive(), said.read_text()
        assert time.monotonic() < deadline, "training never took a step"
        time.sleep(0.1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    errors = said.read_text()
    assert process.exitcode == 130, errors
    assert "Traceback" not in errors
    assert "--resume" in errors
    assert "interrupted" in errors
    step = int(re.search(r"stopped at step ([\d,]+) of", errors).group(1).replace(",", ""))
    assert step >= 3
    status, _, errors = run("train", recipe, f"train.max_steps={step + 2}", "--resume")
    assert status == 0, errors
    assert f"step {step + 2}" in run("inspect", tmp_path / "run" / "train")[1]


# --- help -----------------------------------------------------------------------------------------------------------


def test_the_package_run_as_a_module_is_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draftsmith", "train", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("draftsmith", run_name="__main__")
    assert ended.value.code == 0
    assert "draftsmith train my.yaml" in " ".join(capsys.readouterr().out.split())


def test_every_command_explains_itself_with_an_example():
    for command in [*COMMANDS, "demo", "inspect", "schema", "algorithms"]:
        status, out, _ = run(command, "--help")
        assert status == 0
        assert f"Example: draftsmith {command}" in " ".join(out.split())


def test_every_command_and_option_has_a_place_in_the_documentation():
    import typer

    group = typer.main.get_command(app)
    pages = Path(__file__).parents[2] / "docs" / "commands"
    assert {page.stem for page in pages.glob("*.md")} == set(group.commands)
    for name, command in group.commands.items():
        page = (pages / f"{name}.md").read_text()
        assert f"draftsmith {name}" in page
        for parameter in command.params:
            for option in [flag for flag in parameter.opts if flag.startswith("--") and flag != "--help"]:
                assert option in page, f"{name}.md does not mention {option}"


def test_schema_and_algorithms_print():
    assert "properties" in json.loads(run("schema")[1])
    listed = run("algorithms")[1]
    assert "dflash" in listed
    assert "1,048,626,432" in listed  # numbers stay whole however narrow the console is
