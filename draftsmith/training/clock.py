"""Time, tokens and arithmetic since the last log entry."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Clock:
    """Runs from its creation; `waited`: seconds spent waiting for data. Evaluation and saving do not count (`stopped`).

    Tokens and FLOP are added up on the device, so that counting them never waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._started = time.perf_counter()
        self.waited = 0.0
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, tokens: Tensor, flops: Tensor) -> None:
        """Counts tokens and FLOP, scalars on the device, of all processes."""
        self._totals += torch.stack((tokens, flops))

    def totals(self) -> tuple[float, float]:
        """(tokens, FLOP) of all processes."""
        tokens, flops = self._totals.tolist()
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
