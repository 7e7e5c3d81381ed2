"""One process of a capture that a launcher started: `python -m tests.capture.distributed_capture JOBS.json`.

JOBS.json: a list of the keywords of `job`. Prints one line a job: `done CAPTURED RESUMED`, or `error MESSAGE`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import CaptureLayout
from draftsmith.targets.target import Target
from tests.capture.samples import random_samples, run_capture
from tests.tiny import tiny_target

LAYOUT = CaptureLayout((2, 0), 32, final_state=True)


def job(
    target: Target, directory: str, lengths: list[int], options: dict[str, Any], uneven: bool = False
) -> tuple[int, int]:
    """uneven: the processes but the first are given one sample less."""
    samples = random_samples(lengths, vocab_size=96)
    if uneven and os.environ["RANK"] != "0":
        samples = samples[:-1]
    report = run_capture(target, samples, LAYOUT, Path(directory), **options)
    return report.captured, report.resumed


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    target = tiny_target()
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        try:
            print("done", *job(target, **fields), flush=True)
        except DraftsmithError as error:
            print("error", error, flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
