"""The same run in one process and in several (gloo, fp32): one truth."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.algorithms.registry import all_algorithms
from draftsmith.training.checkpoint import RunCheckpoints
from draftsmith.training.record import find_checkpoint
from tests.training.counting import counting_store
from tests.training.distributed_run import train_job
from tests.training.processes import run_group

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

# What a method's `draft` section needs at this size, beside the fields that all share.
FIELDS: dict[str, dict[str, Any]] = {
    "dflash2": {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5},
    "domino": {"gru_hidden_dim": 12, "emb_dim": 10, "shift_label": True},
    "dspark": {"markov_rank": 6},
}
METHODS: dict[str, dict[str, Any]] = {
    **{method.name: {"algorithm": method.name, **FIELDS.get(method.name, {})} for method in all_algorithms()},
    "d-pace": {"algorithm": "dflash", "objective": {"weighting": {"kind": "dpace"}}},
}

KINDS = ("ddp", "fsdp")

# Of 2 processes with DDP every method is tried; otherwise those of a fused loss, of the final state, and of
# a GRU.
WIDE = ("dflash", "dspark", "domino")


def launch(processes: int, jobs: list[dict[str, Any]], directory: Path) -> subprocess.CompletedProcess[str]:
    """Do the jobs as users start processes: by torchrun, each from nothing."""
    listing = directory / "jobs.json"
    listing.write_text(json.dumps(jobs))
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
            *("-m", "tests.training.distributed_run", str(listing)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def logged(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


MACHINE = {"tokens_per_second", "data_wait", "memory_gib"}


def difference(one: Path, other: Path) -> float:
    """The largest difference between two runs' weights and logged numbers; they must have logged the same things."""
    a, b = find_checkpoint(one, "last"), find_checkpoint(other, "last")
    assert a.position.step == b.position.step
    mine, theirs = a.weights(), b.weights()
    assert mine.keys() == theirs.keys()
    found = [float((mine[name] - theirs[name]).abs().max()) for name in mine]
    entries = list(zip(logged(one), logged(other), strict=True))
    for entry, twin in entries:
        assert entry.keys() == twin.keys()
        assert [entry[key] for key in ("kind", "step")] == [twin[key] for key in ("kind", "step")]
        for name in entry.keys() - MACHINE - {"kind", "step"}:
            values, others = (x[name] if isinstance(x[name], list) else [x[name]] for x in (entry, twin))
            assert [v is None for v in values] == [v is None for v in others]
            found += [abs(v - w) for v, w in zip(values, others, strict=True) if v is not None]
    return max(found)


# Ragged documents of which a third have no candidate, several to a row; steps of 4 rows with a short one at each
# epoch's end, so that a process is left without a row, or with one that has no candidate.
OPTIONS = {
    "device": "cpu",
    "rows_per_step": 4,
    "max_steps": 7,
    "eval_every": 3,
    "tokens_per_row": 24,
    "num_anchors": 6,
    "lr": 1e-3,
    "eval_share": 0.15,
}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory, target):
    directory = tmp_path_factory.mktemp("sparse")
    counting_store(directory, target, documents=19, unsupervised=(1, 4, 6, 9, 12, 15), final_state=True)
    return str(directory)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, sparse):
    """Gives the directory of a method's run in one process with accumulation."""
    root = tmp_path_factory.mktemp("alone")

    @cache
    def run_of(name: str) -> Path:
        train_job(store=sparse, run_dir=str(root / name), options=OPTIONS, draft=METHODS[name])
        return root / name

    return run_of


@pytest.mark.parametrize(
    ("processes", "parallel", "methods"),
    [(2, "ddp", tuple(METHODS)), (2, "fsdp", WIDE), (4, "ddp", WIDE), (4, "fsdp", WIDE)],
    ids=["2-ddp", "2-fsdp", "4-ddp", "4-fsdp"],
)
def test_several_processes_equal_one_with_accumulation(tmp_path, sparse, alone, processes, parallel, methods):
    options = {**OPTIONS, "parallel": parallel}
    jobs = [
        {"store": sparse, "run_dir": str(tmp_path / name), "options": options, "draft": METHODS[name]}
        for name in methods
    ]
    run_group(processes, jobs, tmp_path)
    differences = {name: difference(alone(name), tmp_path / name) for name in methods}
    print(processes, parallel, differences)
    assert max(differences.values()) < 1e-6, differences
    checkpoint = find_checkpoint(tmp_path / "dflash", "last")
    assert checkpoint.sharded == (parallel == "fsdp")


def test_several_processes_equal_one_in_bf16(tmp_path, sparse):
    """The forward's bf16 copies, exchanged as the fp32 gradients that they give. Sums in another order may round a
    weight's copy the other way: a step of bf16 is 2^-8 of a weight."""
    options = {**OPTIONS, "precision": "bf16", "max_steps": 4}
    job = {"store": sparse, "draft": METHODS["dflash"]}
    train_job(**job, run_dir=str(tmp_path / "alone"), options=options)
    jobs = [{**job, "run_dir": str(tmp_path / kind), "options": {**options, "parallel": kind}} for kind in KINDS]
    run_group(2, jobs, tmp_path)
    differences = {kind: difference(tmp_path / "alone", tmp_path / kind) for kind in KINDS}
    print(differences)
    assert max(differences.values()) < 1e-4, differences


def test_the_comparison_sees_small_differences(alone, tmp_path, sparse):
    """A learning rate that differs by a thousandth shows."""
    train_job(store=sparse, run_dir=str(tmp_path), options={**OPTIONS, "lr": 1.001e-3}, draft=METHODS["dflash"])
    assert difference(alone("dflash"), tmp_path) > 1e-6


@pytest.mark.parametrize(
    ("before", "after"), [((2, "ddp"), (1, "ddp")), ((1, "ddp"), (2, "fsdp")), ((2, "fsdp"), (1, "ddp"))]
)
def test_a_run_resumes_with_another_number_of_processes(tmp_path, sparse, alone, before, after):
    """Both kinds of checkpoint, read by another number and kind of processes."""
    run_dir = tmp_path / "mixed"
    for (processes, parallel), resume in ((before, False), (after, True)):
        options = {**OPTIONS, "parallel": parallel, "save_every": 4, "keep_last": 3}
        job = {"store": sparse, "run_dir": str(run_dir), "options": options, "resume": resume}
        if processes == 1:
            train_job(**job, draft=METHODS["dflash"])
        else:
            run_group(processes, [{**job, "draft": METHODS["dflash"]}], tmp_path)
        if not resume:
            for checkpoint in RunCheckpoints(run_dir / "checkpoints").all():
                if checkpoint.position.step > 4:
                    checkpoint.directory.rename(checkpoint.directory.with_suffix(".gone"))
    assert find_checkpoint(run_dir, "last").position.step == 7
    assert difference(alone("dflash"), run_dir) < 1e-6


def test_resumed_shards_are_bit_identical(tmp_path, sparse):
    options = {**OPTIONS, "parallel": "fsdp", "save_every": 4, "keep_last": 3}
    job = {"store": sparse, "options": options, "draft": METHODS["domino"]}
    straight, resumed = (str(tmp_path / name) for name in ("straight", "resumed"))
    run_group(2, [{**job, "run_dir": straight}], tmp_path)
    shutil.copytree(straight, resumed)
    for checkpoint in RunCheckpoints(tmp_path / "resumed" / "checkpoints").all():
        if checkpoint.position.step > 4:
            checkpoint.directory.rename(checkpoint.directory.with_suffix(".gone"))
    run_group(2, [{**job, "run_dir": resumed, "resume": True}], tmp_path)
    a, b = (find_checkpoint(Path(path), "last").weights() for path in (straight, resumed))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert difference(Path(straight), Path(resumed)) == 0.0


def test_torchrun_starts_the_same_run_and_shows_an_error(tmp_path, sparse, alone):
    """A whole run, and then one whose steps two processes cannot share."""
    job = {"store": sparse, "options": OPTIONS, "draft": METHODS["dflash"]}
    uneven = {**job, "options": {**OPTIONS, "rows_per_step": 3}}
    runs = [{**job, "run_dir": str(tmp_path / "run")}, {**uneven, "run_dir": str(tmp_path / "uneven")}]
    result = launch(2, runs, tmp_path)
    assert result.returncode != 0
    assert result.stdout.count("done 7") == 2, result.stdout[-2000:] + result.stderr[:6000]
    assert "train.rows_per_step is 3, with 2 processes" in result.stdout
    assert difference(alone("dflash"), tmp_path / "run") < 1e-6
