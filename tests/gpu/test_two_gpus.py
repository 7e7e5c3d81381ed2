"""Training by two processes, each on a GPU of its own (NCCL), against one on one GPU; fp32, without torch.compile."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.training.record import find_checkpoint
from tests.training.counting import counting_store, counting_target
from tests.training.distributed_run import train_job

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

# 19 documents, several to a row; steps of 4 rows, with a short one at each epoch's end.
OPTIONS = {
    "rows_per_step": 4,
    "max_steps": 7,
    "save_every": 3,
    "keep_last": 3,
    "tokens_per_row": 24,
    "num_anchors": 6,
    "lr": 1e-3,
    "eval_share": 0,
    "precision": "fp32",
    "compile": False,
}
DRAFT = {"algorithm": "dspark", "markov_rank": 6, "head_dim": 16}
KINDS = ("ddp", "fsdp")


def job(store: Path, run_dir: Path, kind: str, **fields: Any) -> dict[str, Any]:
    options = {**OPTIONS, "device": "auto", "parallel": kind}
    return {"store": str(store), "draft": DRAFT, "run_dir": str(run_dir), "options": options, **fields}


def on_two(jobs: list[dict[str, Any]], directory: Path) -> None:
    listing = directory / "jobs.json"
    listing.write_text(json.dumps(jobs))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.training.distributed_run", str(listing)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def difference(one: Path, other: Path) -> float:
    """The largest difference between the weights at the runs' ends and between their losses, of seven steps each."""
    mine, theirs = (find_checkpoint(run, "last").weights() for run in (one, other))
    found = [float((mine[name] - theirs[name]).abs().max()) for name in mine]
    entries = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other)]
    losses = [{entry["step"]: entry["loss"] for entry in logged if entry["kind"] == "train"} for logged in entries]
    assert list(losses[0]) == list(losses[1]) == list(range(1, 8))
    return max(found + [abs(loss - losses[1][step]) for step, loss in losses[0].items()])


def go_back(run: Path) -> None:
    """Drop the checkpoints after step 3."""
    while (last := find_checkpoint(run, "last")).position.step > 3:
        shutil.rmtree(last.directory)


def test_two_gpus_train_as_one_and_go_on_with_each_others_checkpoints(tmp_path):
    """DDP and FSDP2 beside one GPU; then what both left at step 3 is gone on with by one GPU, and by the other kind on
    two: always the same losses and weights, to the rounding of fp32 sums in another order."""
    store = tmp_path / "store"
    counting_store(store, counting_target(), documents=19, unsupervised=(1, 4, 6, 9, 12, 15), final_state=True)
    alone, runs = tmp_path / "alone", {kind: tmp_path / kind for kind in KINDS}
    train_job(**job(store, alone, "ddp"))
    on_two([job(store, run, kind) for kind, run in runs.items()], tmp_path)
    for run in runs.values():
        assert difference(run, alone) < 1e-4
    for kind, run in runs.items():
        go_back(run)
        train_job(**job(store, run, kind, resume=True))
        assert difference(run, alone) < 1e-4
        go_back(run)
    others = dict(zip(reversed(KINDS), runs.values(), strict=True))
    on_two([job(store, run, kind, resume=True) for kind, run in others.items()], tmp_path)
    for run in runs.values():
        assert difference(run, alone) < 1e-4
