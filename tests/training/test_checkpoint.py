import json
import logging
import resource

import pytest
import torch
from accelerate import Accelerator

from draftsmith.errors import DraftsmithError
from draftsmith.training.checkpoint import POSITION, SHARDS, STATE, WEIGHTS, Position, RunCheckpoints


def position(step: int, score: float | None = None) -> Position:
    return Position(step=step, epoch=0, step_in_epoch=step, score=score)


def save(checkpoints: RunCheckpoints, step: int, score: float | None = None, size: int = 5) -> dict[str, torch.Tensor]:
    weights = {"a": torch.randn(size, 3), "b": torch.randn(7)}
    checkpoints.save(position(step, score), weights, {"optimizer": {"step": torch.tensor(step)}, "generators": []})
    return weights


def steps(checkpoints: RunCheckpoints) -> list[int]:
    return [checkpoint.position.step for checkpoint in checkpoints.all()]


def test_round_trip_is_bit_exact(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    weights = save(checkpoints, 12, score=1.5)
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.position.step, latest.position.score) == (12, 1.5)
    loaded = latest.weights()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert latest.state()["optimizer"]["step"] == 12


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    save(checkpoints, 3)
    weights = save(checkpoints, 3)
    assert steps(checkpoints) == [3]
    assert torch.equal(checkpoints.all()[0].weights()["a"], weights["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_what_a_killed_writer_left_is_not_a_checkpoint(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    save(checkpoints, 3)
    save(checkpoints, 4)
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000004.partial")
    assert steps(checkpoints) == [3]
    checkpoints.prune(keep_last=1, keep_best=0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_a_truncated_file_is_named_and_the_one_before_is_taken(tmp_path, caplog, name):
    checkpoints = RunCheckpoints(tmp_path)
    save(checkpoints, 3)
    save(checkpoints, 4)
    path = tmp_path / "step-00000004" / name
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        latest = checkpoints.latest()
    assert latest is not None
    assert latest.position.step == 3
    assert "step-00000004" in caplog.text
    assert name in caplog.text


def test_a_damaged_or_missing_position_is_not_a_checkpoint(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    for step in (1, 2, 3):
        save(checkpoints, step)
    (tmp_path / "step-00000003" / POSITION).write_text('{"step": 3')
    (tmp_path / "step-00000002" / POSITION).unlink()
    assert steps(checkpoints) == [1]


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    for step, score in ((1, 0.5), (2, 2.0), (3, None), (4, 1.0), (5, None), (6, 0.1)):
        save(checkpoints, step, score)
    checkpoints.prune(keep_last=2, keep_best=2)
    assert steps(checkpoints) == [2, 4, 5, 6]
    best = checkpoints.best()
    assert best is not None
    assert best.position.step == 2


def test_without_an_evaluation_there_is_no_best(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    assert checkpoints.best() is None
    save(checkpoints, 1)
    assert checkpoints.best() is None


@pytest.mark.parametrize("limit", [2_000, 20_000])
def test_a_full_disk_leaves_the_previous_checkpoint_and_says_so(tmp_path, limit):
    """A limit on file sizes fails writes as a full disk does; the two limits hit the weights and the optimiser
    state."""
    checkpoints = RunCheckpoints(tmp_path)
    weights = save(checkpoints, 3)
    state = {"optimizer": torch.randn(10_000)}
    big = {"a": torch.randn(1_000, 3)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(DraftsmithError, match=r"step 4 could not be written.*the one of step 3 is intact"):
            checkpoints.save(position(4), big, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert steps(checkpoints) == [3]
    assert torch.equal(checkpoints.all()[0].weights()["a"], weights["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    checkpoints.save(position(4), big, state)
    assert steps(checkpoints) == [3, 4]


def test_the_position_is_readable_json(tmp_path):
    save(RunCheckpoints(tmp_path), 3)
    assert json.loads((tmp_path / "step-00000003" / POSITION).read_text())["step"] == 3


def save_sharded(checkpoints: RunCheckpoints, step: int, size: int = 5) -> dict[str, torch.Tensor]:
    weights = {"a": torch.randn(size, 3), "b": torch.randn(7)}
    optimizer = {f"exp_avg.{name}": torch.randn_like(weight) for name, weight in weights.items()}
    checkpoints.save_sharded(position(step), weights, optimizer, {"generators": []}, Accelerator(cpu=True))
    return {**weights, **optimizer}


def test_shards_are_read_whole_and_into_place(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    saved = save_sharded(checkpoints, 3)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.sharded
    loaded = latest.weights()
    assert sorted(loaded) == ["a", "b"]
    assert all(torch.equal(loaded[name], saved[name]) for name in loaded)
    places = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    weights = {name: tensor for name, tensor in places.items() if "." not in name}
    latest.read_into(weights, {name: tensor for name, tensor in places.items() if "." in name})
    assert all(torch.equal(places[name], saved[name]) for name in saved)


def test_a_damaged_shard_is_named(tmp_path, caplog):
    checkpoints = RunCheckpoints(tmp_path)
    save_sharded(checkpoints, 3)
    save_sharded(checkpoints, 4)
    (shard,) = (tmp_path / "step-00000004" / SHARDS).glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert steps(checkpoints) == [3]
    assert shard.name in caplog.text


def test_a_full_disk_leaves_the_previous_shards_and_says_so(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    saved = save_sharded(checkpoints, 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(DraftsmithError, match=r"step 4 could not be written.*the one of step 3 is intact"):
            save_sharded(checkpoints, 4, size=10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert torch.equal(checkpoints.all()[0].weights()["a"], saved["a"])
