"""Online training by command: the same run as from a store, and options that contradict each other."""

import json

import pytest

from draftsmith.targets.target import Target
from tests.cli.test_cli import fails, run, save_target, write_lines, write_recipe

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    directory = tmp_path_factory.mktemp("online")
    chats = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "a b c d e f g h"}]}
        for n in range(12)
    ]
    return write_recipe(
        directory,
        save_target(directory / "target"),
        data={"conversations": str(write_lines(directory / "chats.jsonl", chats))},
        capture={"dtype": "float32"},
    )


def losses(directory):
    lines = (directory / "train" / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if entry["kind"] == "train"]


def test_training_online_is_training_from_a_store(recipe, tmp_path):
    for command, *overrides in (("capture",), ("train", "track.every=1")):
        status, _, errors = run(command, recipe, f"run={tmp_path / 'stored'}", *overrides)
        assert status == 0, errors
    status, _, errors = run("train", recipe, f"run={tmp_path / 'live'}", "track.every=1", "train.features=online")
    assert status == 0, errors
    assert not (tmp_path / "live" / "features").exists()
    stored = losses(tmp_path / "stored")
    assert len(stored) == 3
    assert losses(tmp_path / "live") == pytest.approx(stored, rel=1e-4)
    status, _, errors = run(
        "train", recipe, f"run={tmp_path / 'other'}", "track.every=1", "train.features=online", "train.seed=7"
    )
    assert status == 0, errors
    assert losses(tmp_path / "other") != pytest.approx(stored, rel=1e-4)
    assert "the best at" not in errors
    status, _, errors = run("train", recipe, f"run={tmp_path / 'stored'}", "train.eval_share=0.2", "--fresh")
    assert status == 0, errors
    assert "training: 3 steps, the best at 3;" in errors


def test_options_that_do_not_go_together_are_errors(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = fails(
        "train", recipe, f"run={tmp_path / 'run'}", "train.features=online", f"train.online.cache={tmp_path / 'cache'}"
    )
    assert "train.online.cache" in message
    assert "2 processes" in message
    assert "--fresh works in one process" in fails("train", recipe, f"run={tmp_path / 'run'}", "--fresh")


def test_a_target_that_a_server_runs_is_not_loaded(recipe, tmp_path, monkeypatch):
    def load(*arguments, **named):
        raise AssertionError("the whole target was loaded")

    monkeypatch.setattr(Target, "load", load)
    server = ("capture.backend=vllm", "capture.vllm.base_url=http://127.0.0.1:9/v1")
    assert "no answer from http://127.0.0.1:9" in fails(
        "train", recipe, f"run={tmp_path / 'run'}", "train.features=online", *server
    )
