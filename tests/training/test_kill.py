"""Runs that are killed, as processes of their own, and go on."""

import json
import os
import signal
import time

import pytest
import torch

from draftsmith.training.checkpoint import RunCheckpoints
from draftsmith.training.record import find_checkpoint
from tests.training.counting import counting_store
from tests.training.distributed_run import train_job
from tests.training.processes import ProcessGroup

OPTIONS = {
    "device": "cpu",
    "max_steps": 45,
    "rows_per_step": 2,
    "tokens_per_row": 48,
    "num_anchors": 8,
    "eval_share": 0.15,
    "save_every": 5,
    "eval_every": 9,
    "keep_last": 2,
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def features(tmp_path_factory, target):
    directory = tmp_path_factory.mktemp("kill")
    counting_store(directory, target, documents=17)
    return str(directory)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, features):
    directory = tmp_path_factory.mktemp("straight")
    train_job(store=features, run_dir=str(directory), options=OPTIONS)
    return directory


def steps_logged(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["step"] for line in lines if json.loads(line)["kind"] == "train"]


def start(tmp_path, features, processes):
    job = {"store": features, "run_dir": str(tmp_path / "run"), "options": OPTIONS}
    return ProcessGroup(processes, [job], tmp_path)


def wait_for(group, run_dir, step):
    deadline = time.monotonic() + 240
    while not any(done >= step for done in steps_logged(run_dir)):
        assert group.running(), "the run ended before it was to be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def assert_same(straight, run_dir):
    a, b = find_checkpoint(straight, "last"), find_checkpoint(run_dir, "last")
    assert a.position == b.position
    mine, theirs = a.weights(), b.weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert steps_logged(run_dir) == list(range(1, 46))


def test_sigkill_loses_no_more_than_the_steps_since_the_last_save(tmp_path, features, straight):
    group = start(tmp_path, features, 1)
    wait_for(group, tmp_path / "run", 12)
    os.kill(group.pid(), signal.SIGKILL)
    assert group.finish() == [-signal.SIGKILL]
    latest = RunCheckpoints(tmp_path / "run" / "checkpoints").latest()
    assert latest is not None
    assert 0 <= max(steps_logged(tmp_path / "run")) - latest.position.step <= OPTIONS["save_every"]
    train_job(store=features, run_dir=str(tmp_path / "run"), options=OPTIONS, resume=True)
    assert_same(straight, tmp_path / "run")


def test_sigterm_finishes_the_step_saves_and_goes_on_bit_for_bit(tmp_path, features, straight):
    group = start(tmp_path, features, 1)
    wait_for(group, tmp_path / "run", 12)
    os.kill(group.pid(), signal.SIGTERM)
    assert group.finish() == [0], group.output()
    stopped = int(group.output().split()[-1])
    assert 12 <= stopped < 45
    assert find_checkpoint(tmp_path / "run", "last").position.step == stopped == max(steps_logged(tmp_path / "run"))
    assert "stopped by SIGTERM" in (tmp_path / "run" / "report.html").read_text()
    train_job(store=features, run_dir=str(tmp_path / "run"), options=OPTIONS, resume=True)
    assert_same(straight, tmp_path / "run")


def test_a_signal_to_one_process_stops_all_at_the_same_step(tmp_path, features):
    group = start(tmp_path, features, 2)
    wait_for(group, tmp_path / "run", 3)
    os.kill(group.pid(rank=1), signal.SIGTERM)
    assert group.finish() == [0, 0], group.output()
    stopped = {line for line in group.output().splitlines() if line.startswith("done")}
    assert group.output().count("done") == 2
    assert len(stopped) == 1
    assert find_checkpoint(tmp_path / "run", "last").position.step == int(stopped.pop().split()[1]) < 45
