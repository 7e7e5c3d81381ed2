"""What happened since the last log entry: sums of metrics, time, tokens and arithmetic."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator

from draftsmith.algorithms.trainee import Work
from draftsmith.training.sums import Averages, Sums
from draftsmith.training.tracking import memory_bytes


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
    def waiting(self) -> Iterator[None]:
        """While open, time is spent waiting for data."""
        before = time.perf_counter()
        yield
        self.waited += time.perf_counter() - before

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While open, time does not count."""
        before = time.perf_counter()
        yield
        self._started += time.perf_counter() - before


class Window:
    """The steps since the last log entry: `sums` of their metrics over all processes, and a clock.

    device: where the run trains; peak: what it can do, in FLOP/s (None: not known). Sums whose name begins with an
    underscore are not reported.
    """

    def __init__(self, device: torch.device, peak: float | None) -> None:
        self._device = device
        self._peak = peak
        self.sums = Sums()
        self.clock = Clock()

    def add(self, sums: Sums) -> None:
        """The sums of one more step."""
        self.sums = self.sums.plus(sums)

    def averages(self) -> Averages:
        """The metrics' averages; waits for the device."""
        return {name: value for name, value in self.sums.averages().items() if not name.startswith("_")}

    def entry(self, averages: Averages, accelerator: Accelerator, **numbers: float) -> dict[str, Any]:
        """The log entry: `averages`, which have waited for the device, `numbers`, and figures of speed and memory. All
        processes call it."""
        tokens, flops = self.clock.totals(accelerator)
        seconds = self.clock.seconds
        entry: dict[str, Any] = {
            **averages,
            **numbers,
            "tokens_per_second": tokens / seconds,
            "data_wait": self.clock.waited / seconds,
            "memory_gib": memory_bytes(self._device) / 2**30,
        }
        if self._peak is not None:
            entry["mfu"] = flops / (seconds * self._peak * accelerator.num_processes)
        return entry

    def start(self) -> None:
        """Time counts from now on."""
        self.clock = Clock()

    def clear(self) -> None:
        """Begin again, with nothing."""
        self.sums, self.clock = Sums(), Clock()
