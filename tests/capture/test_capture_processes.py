"""Several processes fill one store: the same records as one process, bit for bit, whoever computes what."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.capture.plan import padded_tokens, plan_batches, share_batches
from draftsmith.features.reader import Store
from draftsmith.features.verify import verify_store
from tests.features.stores import equal
from tests.tiny import tiny_target

from .distributed_capture import LAYOUT
from .samples import random_samples, run_capture

ROOT = Path(__file__).parents[2]
LENGTHS = [3 + (7 * number) % 41 for number in range(23)]
OPTIONS = {"dtype": "float32", "tokens_per_batch": 60, "shard_bytes": 20_000}


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    budget=st.integers(1, 200),
    count=st.integers(1, 9),
)
def test_shares_hold_every_batch_once_and_differ_by_one_batch_at_most(
    lengths: list[int], budget: int, count: int
) -> None:
    batches = plan_batches(random_samples(lengths), budget)
    shares = share_batches(batches, count)
    assert len(shares) == count
    assert sorted(batch[0].id for share in shares for batch in share) == sorted(batch[0].id for batch in batches)
    loads = [sum(map(padded_tokens, share)) for share in shares]
    assert max(loads) - min(loads) <= max(map(padded_tokens, batches))


def run_processes(count: int, jobs: list[dict[str, Any]], directory: Path) -> list[list[str]]:
    """What each process printed for each job."""
    listing = directory / f"jobs-{count}.json"
    listing.write_text(json.dumps(jobs))
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)),
            *("--tee", "3", "-m", "tests.capture.distributed_capture", str(listing)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, complaints = run.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # the launcher's processes too, which hold its pipes
        raise
    assert run.returncode == 0, complaints[-3000:]
    lines = [line.split("]:", 1) for line in output.splitlines() if "]:" in line]
    return [[text for rank, text in lines if rank.startswith(f"[default{number}")] for number in range(count)]


def records(directory: Path) -> dict[str, Any]:
    return {record.sample_id: record for record in Store.open(directory)}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """All jobs in one group of two processes: starting one takes longer than all captures together."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("processes")
    target = tiny_target()
    samples = random_samples(LENGTHS, vocab_size=96)
    run_capture(target, samples, LAYOUT, directory / "one", **OPTIONS)
    # Begun by one process, which was killed: its first shards, and half of another.
    shutil.copytree(directory / "one", directory / "begun")
    for path in sorted((directory / "begun").glob("*.tokens.safetensors"))[2:]:
        path.unlink()
    (directory / "begun" / "manifest.json").unlink()
    # Begun by three: writer 2, whom nobody succeeds now, left a features file without its tokens.
    (directory / "begun" / "shard-0002-000000.features.safetensors").write_bytes(b"half")
    jobs = [
        {"directory": str(directory / "two"), "lengths": LENGTHS, "options": OPTIONS},
        {"directory": str(directory / "begun"), "lengths": LENGTHS, "options": OPTIONS},
        {"directory": str(directory / "single"), "lengths": [5], "options": OPTIONS},
        {"directory": str(directory / "uneven"), "lengths": LENGTHS, "options": OPTIONS, "uneven": True},
        {"directory": str(directory / "one"), "lengths": LENGTHS, "options": {**OPTIONS, "dtype": "fp8"}},
        {"directory": str(directory / "two"), "lengths": LENGTHS, "options": OPTIONS},
    ]
    return directory, run_processes(2, jobs, directory)


def test_two_processes_make_the_records_of_one(printed: tuple[Path, list[list[str]]]) -> None:
    directory, lines = printed
    assert [rank[0] for rank in lines] == [f" done {len(LENGTHS)} 0"] * 2
    one, two = records(directory / "one"), records(directory / "two")
    assert one.keys() == two.keys()
    assert all(equal(one[sample_id], two[sample_id]) for sample_id in one)
    assert verify_store(directory / "two") == []
    tokens = {
        number: sum(s.tokens for s in Store.open(directory / "two").manifest.shards if f"shard-{number}" in s.name)
        for number in ("0000", "0001")
    }
    assert abs(tokens["0000"] - tokens["0001"]) <= OPTIONS["tokens_per_batch"]


def test_another_number_of_processes_goes_on_with_a_capture(printed: tuple[Path, list[list[str]]]) -> None:
    """Trap 19."""
    directory, lines = printed
    assert lines[0][1] == lines[1][1]
    _, captured, resumed = lines[0][1].split()
    assert int(captured) + int(resumed) == len(LENGTHS)
    assert int(captured) > 0
    assert int(resumed) > 0
    one, begun = records(directory / "one"), records(directory / "begun")
    assert one.keys() == begun.keys()
    assert all(equal(one[sample_id], begun[sample_id]) for sample_id in one)
    assert not list((directory / "begun").glob("shard-0002*"))


def test_a_process_without_work_is_fine(printed: tuple[Path, list[list[str]]]) -> None:
    """Trap 18."""
    directory, lines = printed
    assert [rank[2] for rank in lines] == [" done 1 0"] * 2
    assert len(Store.open(directory / "single")) == 1


def test_processes_with_other_samples_are_told(printed: tuple[Path, list[list[str]]]) -> None:
    directory, lines = printed
    assert all("error processes [1] were given other samples than process 0" in rank[3] for rank in lines)
    assert not (directory / "uneven").exists()


def test_what_the_first_process_finds_wrong_all_say(printed: tuple[Path, list[list[str]]]) -> None:
    _, lines = printed
    assert all("dtype: the store has 'float32', this run needs 'fp8'" in rank[4] for rank in lines)


def test_a_finished_capture_is_not_done_again(printed: tuple[Path, list[list[str]]]) -> None:
    _, lines = printed
    assert [rank[-1] for rank in lines] == [f" done 0 {len(LENGTHS)}"] * 2
