"""Non-finite numbers: found on the device in the step that makes them, read by the host when that costs nothing."""

import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from draftsmith.errors import DraftsmithError
from draftsmith.training.update import Update


class NonFiniteError(DraftsmithError):
    """A loss or a gradient was NaN or infinite."""


@dataclass(frozen=True)
class MicroBatchRecord:
    """What the guard keeps of each forward until its step is judged: its documents and its loss numerator."""

    sample_ids: list[list[str]]
    numerator: Tensor


@dataclass(frozen=True)
class StepRecord:
    """What the guard keeps of a step (`step` were done before it): `stopping`, scalar, how many processes were asked to
    stop."""

    step: int
    learning_rate: float
    update: Update
    stopping: Tensor
    forwards: list[MicroBatchRecord]


@dataclass(frozen=True)
class Verdict:
    """A step as the host knows it in the end."""

    record: StepRecord
    finite: bool
    stopping: bool


class Verdicts:
    """Steps whose outcome is on its way to the host; `lag` of them may be under way.

    On a GPU a lag of 1 lets the host prepare a step while the one before it computes; on the CPU there is nothing to
    wait for, and the lag is 0.
    """

    def __init__(self, device: torch.device, lag: int) -> None:
        self._device = device
        self._lag = lag
        self._waiting: deque[tuple[StepRecord, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, record: StepRecord) -> None:
        """Start bringing the outcome of a step to the host."""
        outcome = torch.stack((record.update.finite.double(), record.stopping.double()))
        if self._device.type != "cuda":
            self._waiting.append((record, outcome, None))
            return
        on_host = torch.empty(2, dtype=torch.float64, pin_memory=True)
        on_host.copy_(outcome, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((record, on_host, event))

    def take(self, *, all_of_them: bool = False) -> list[Verdict]:
        """The outcomes that are due: all but the last `lag` steps', or all."""
        due = []
        while len(self._waiting) > (0 if all_of_them else self._lag):
            record, outcome, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            finite, stopping = outcome.tolist()
            due.append(Verdict(record, finite == 1.0, stopping > 0))
        return due


@dataclass(frozen=True)
class NonFiniteReport:
    """The debug record: the first non-finite tensor, and the documents of the forwards that may have made it."""

    step: int
    rank: int
    learning_rate: float
    first_tensor: str
    sample_ids: list[str]
    numerators: list[float]

    def __str__(self) -> str:
        shown = ", ".join(self.sample_ids[:8]) + (", ..." if len(self.sample_ids) > 8 else "")
        return f"step {self.step}: {self.first_tensor} is not finite (documents: {shown}); the weights were not updated"


def find_non_finite(module: nn.Module, gradient_names: list[str], record: StepRecord, rank: int) -> NonFiniteReport:
    """Name the first non-finite tensor in the order in which one makes the next: weights, losses, gradients.

    gradient_names: the parameters of `record.update.norms`. The documents are those of the forwards with a non-finite
    loss, or all of the step's where every loss is finite.
    """
    bad = [forward for forward in record.forwards if not torch.isfinite(forward.numerator)]
    weight = next((name for name, value in module.named_parameters() if not torch.isfinite(value).all()), None)
    gradients = torch.isfinite(record.update.norms).tolist()
    gradient = next((name for name, good in zip(gradient_names, gradients, strict=True) if not good), None)
    if weight is not None:
        first = f"weight {weight}"
    elif bad:
        first = "loss"
    elif gradient is not None:
        first = f"gradient of {gradient}"
    else:
        first = "a loss of another process"
    return NonFiniteReport(
        step=record.step,
        rank=rank,
        learning_rate=record.learning_rate,
        first_tensor=first,
        sample_ids=[name for forward in bad or record.forwards for row in forward.sample_ids for name in row],
        numerators=[float(forward.numerator) for forward in record.forwards],
    )


def write_report(report: NonFiniteReport, debug_dir: Path) -> str:
    """Save the debug record; returns its path, or why there is none: what it is about matters more."""
    path = debug_dir / f"step-{report.step:08d}-rank-{report.rank}.json"
    try:
        debug_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(report), indent=1))
    except OSError as error:
        return f"not written ({error})"
    return str(path)
