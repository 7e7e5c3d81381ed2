"""Time, tokens and arithmetic since the last log entry."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator

from draftsmith.algorithms.trainee import Work


class Clock:
    """Runs from its creation; `waited`: seconds spent waiting for data. Evaluation and saving do not count (`stopped`).

    Tokens and FLOP are this process's until they are asked for, so that counting them takes nothing of the device.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.waited = 0.0
        self._tokens = 0
        self._flops = 0.0

    def add(self, work: Work) -> None:
        """Counts what this process has done."""
        self._tokens += work.tokens
        self._flops += work.flops

    def totals(self, accelerator: Accelerator) -> tuple[float, float]:
        """(tokens, FLOP) of all processes, each of which has to call it."""
        if accelerator.num_processes == 1:
            return self._tokens, self._flops
        own = torch.tensor([self._tokens, self._flops], dtype=torch.float64, device=accelerator.device)
        tokens, flops = accelerator.reduce(own, reduction="sum").tolist()
        return tokens, flops

    @property
    def seconds(self) -> float:
        """Since the creation, less what was `stopped`."""
        return time.perf_counter() - self._started

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While open, time does not count."""
        before = time.perf_counter()
        yield
        self._started += time.perf_counter() - before
