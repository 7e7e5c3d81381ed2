"""The same run in one process and in several (gloo, fp32): one truth."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.training.options import TrainOptions
from draftsmith.training.record import find_checkpoint
from draftsmith.training.run import train
from tests.training.counting import QUIET, counting_store, options, section

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run_processes(processes: int, store: Path, run_dir: Path, chosen: TrainOptions) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
            *("-m", "tests.training.distributed_run", str(store), str(run_dir), chosen.model_dump_json()),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]


def run_here(target, store, run_dir, chosen: TrainOptions, resume: bool = False) -> None:
    train(
        draft_section=section(),
        target=target,
        ends=target.ends,
        store=store,
        run_dir=run_dir,
        options=chosen,
        track=QUIET,
        resume=resume,
    )


def assert_same_run(one: Path, other: Path) -> None:
    a, b = find_checkpoint(one, "last"), find_checkpoint(other, "last")
    assert a.position.step == b.position.step
    for name, weight in a.weights().items():
        torch.testing.assert_close(b.weights()[name], weight, atol=1e-6, rtol=0)
    logs = [list(map(json.loads, (path / "metrics.jsonl").read_text().splitlines())) for path in (one, other)]
    assert len(logs[0]) == len(logs[1])
    for entry, twin in zip(*logs, strict=True):
        assert (entry["kind"], entry["step"]) == (twin["kind"], twin["step"])
        for name in ("loss", "accuracy", "accept_length"):
            assert entry[name] == pytest.approx(twin[name], abs=1e-6), (entry["kind"], entry["step"], name)


def test_two_processes_equal_one_with_accumulation(target, tmp_path):
    """Ragged documents of which a third have no candidate; steps of 4 rows with a short one at each epoch's end, so
    that a process is left without a row as well."""
    store = counting_store(tmp_path / "store", target, documents=19, unsupervised=(1, 4, 6, 9, 12, 15))
    chosen = options(rows_per_step=4, max_steps=7, eval_every=3, tokens_per_row=24, num_anchors=6, lr=1e-3)
    run_here(target, store, tmp_path / "one", chosen)
    run_processes(2, tmp_path / "store", tmp_path / "two", chosen)
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_a_run_of_two_processes_resumes_in_one(target, tmp_path):
    store = counting_store(tmp_path / "store", target, documents=13)
    chosen = options(rows_per_step=2, max_steps=6, lr=1e-3, save_every=3, keep_last=2)
    run_here(target, store, tmp_path / "straight", chosen)
    run_processes(2, tmp_path / "store", tmp_path / "mixed", chosen)
    last = find_checkpoint(tmp_path / "mixed", "last")
    last.directory.rename(last.directory.with_suffix(".gone"))
    assert find_checkpoint(tmp_path / "mixed", "last").position.step == 3
    run_here(target, store, tmp_path / "mixed", chosen, resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "mixed")
