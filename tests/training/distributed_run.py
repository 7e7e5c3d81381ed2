"""Run by torchrun, by forked processes, or called in one: trains the counting language once for every job.

Argument: a JSON file with a list of jobs, each the keywords of `train_job`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import DraftsmithError
from draftsmith.features.reader import Store
from draftsmith.run.recipe import parse_recipe
from draftsmith.training.options import TrainOptions
from draftsmith.training.run import TrainResult, train
from draftsmith.training.source import StoreSource
from tests.training.counting import BASE, QUIET, counting_target


def train_job(
    *,
    store: str,
    run_dir: str,
    options: dict[str, Any],
    draft: dict[str, Any] | None = None,
    resume: bool = False,
    every: int = 1,
) -> TrainResult:
    """draft: fields of the recipe's `draft` section, over those of all tests."""
    target = counting_target()
    fields = {"run": "run", "target": {"path": "counting"}, "draft": {"algorithm": "dflash", **BASE, **(draft or {})}}
    return train(
        section=parse_recipe(fields).draft,
        target=target,
        source=StoreSource(Store.open(store)),
        run_dir=Path(run_dir),
        options=TrainOptions(**options),
        track=QUIET.model_copy(update={"every": every}),
        resume=resume,
    )


def run_jobs(jobs: list[dict[str, Any]]) -> None:
    """Do the jobs, one after the other; prints a line for each, and exits with status 1 at the first error."""
    torch.set_num_threads(1)
    for job in jobs:
        try:
            sys.stdout.write(f"done {train_job(**job).step}\n")  # at once: processes share a launcher's output
            sys.stdout.flush()
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # a launcher ends all at the first error, and that is to be the next job's
        except DraftsmithError as error:
            print("error", error, flush=True)
            raise SystemExit(1) from None
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_jobs(json.loads(Path(sys.argv[1]).read_text()))
