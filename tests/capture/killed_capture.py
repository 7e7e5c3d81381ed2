"""Kills captures at random moments and finishes them: `python -m tests.capture.killed_capture DIRECTORY SEED TRIALS`.

A process of its own, so that it can fork freely. Prints one JSON object: how many captures were killed in the middle,
and how many samples the runs after them found finished.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from draftsmith.features.manifest import StoreError
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.verify import verify_store
from tests.features.stores import equal
from tests.tiny import tiny_target

from .samples import random_samples, run_capture

LAYOUT = CaptureLayout((2, 0), 32, final_state=True)
LENGTHS = [3 + (7 * number) % 41 for number in range(40)]


def child(directory: Path) -> int:
    """Start a capture in a forked process; returns its process id."""
    process = os.fork()
    if process == 0:
        report = run_capture(
            tiny_target(),
            random_samples(LENGTHS),
            LAYOUT,
            directory,
            dtype="float32",
            tokens_per_batch=90,
            shard_bytes=20_000,
        )
        (directory / "resumed").write_text(str(report.resumed))
        os._exit(0)
    return process


def finish(process: int) -> bool:
    """Wait for a capture; whether it was killed."""
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def main(directory: Path, seed: int, trials: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    start = time.monotonic()
    assert not finish(child(directory / "whole"))
    duration = time.monotonic() - start
    whole = {record.sample_id: record for record in Store.open(directory / "whole")}
    assert len(whole) == len(LENGTHS)

    killed = resumed = 0
    for trial in range(trials):
        place = directory / f"trial{trial}"
        while True:
            process = child(place)
            time.sleep(chance.uniform(0.05, 1.0) * duration)
            os.kill(process, signal.SIGKILL)
            if not finish(process):
                break
            killed += 1
            if (place / "manifest.json").exists():  # killed after its last write
                assert len(Store.open(place)) == len(LENGTHS)
            else:
                with pytest.raises(StoreError, match="not finished"):
                    Store.open(place)
            if chance.random() < 0.5:
                assert not finish(child(place))
                break
        resumed += int((place / "resumed").read_text())
        store = Store.open(place)
        assert len(store) == len(whole)
        assert all(equal(record, whole[record.sample_id]) for record in store)
        assert verify_store(place) == []
        assert not list(place.glob("*.partial"))
    print(json.dumps({"killed": killed, "resumed": resumed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
