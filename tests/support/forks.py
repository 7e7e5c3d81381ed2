"""Processes forked from one that has imported everything.

A process from nothing imports for many seconds; a fork of Python's forkserver is there at once.
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["tests.training.distributed_run", "tests.capture.forked_captures", "draftsmith.stages.workspace"]
)


def fork(
    work: Callable[..., object], *arguments: Any, said: Path, environment: Mapping[str, object] | None = None
) -> BaseProcess:
    """Start `work(*arguments)` in a process of its own, on one thread and without a GPU, with more `environment`; what
    it prints, errors among it, goes to the file `said`."""
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    process = _FORKS.Process(target=_run, args=(own, said, work, arguments))
    process.start()
    return process


def _run(
    environment: Mapping[str, object], said: Path, work: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {name: str(value) for name, value in environment.items()}
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    work(*arguments)
