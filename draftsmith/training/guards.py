"""Non-finite numbers stop the run: what was found, where, and in which documents."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from draftsmith.errors import DraftsmithError


class NonFiniteError(DraftsmithError):
    """A loss or a gradient was NaN or infinite."""


@dataclass(frozen=True)
class MicroBatchRecord:
    """What the guard keeps of each forward until its step is over: its documents and its loss numerator."""

    sample_ids: list[list[str]]
    numerator: Tensor


@dataclass(frozen=True)
class NonFiniteReport:
    """The debug record: the first non-finite tensor, and the documents of the forwards that may have made it."""

    step: int
    rank: int
    learning_rate: float
    first_tensor: str
    sample_ids: list[str]
    numerators: list[float]


def find_non_finite(
    module: nn.Module, forwards: list[MicroBatchRecord], *, step: int, rank: int, learning_rate: float
) -> NonFiniteReport:
    """Name the first non-finite tensor in the order in which one makes the next: weights, losses, gradients.

    The documents are those of the forwards with a non-finite loss, or all of the step's where every loss is finite.
    """
    bad = [record for record in forwards if not torch.isfinite(record.numerator)]
    name = (
        _first_non_finite(("weight " + name, p) for name, p in module.named_parameters())
        or ("loss" if bad else None)
        or _first_non_finite(("gradient of " + n, p.grad) for n, p in module.named_parameters() if p.grad is not None)
        or "a gradient of another process"
    )
    return NonFiniteReport(
        step=step,
        rank=rank,
        learning_rate=learning_rate,
        first_tensor=name,
        sample_ids=[sample_id for record in bad or forwards for row in record.sample_ids for sample_id in row],
        numerators=[float(record.numerator) for record in forwards],
    )


def stop_run(report: NonFiniteReport, debug_dir: Path) -> None:
    """Save the debug record and raise `NonFiniteError`."""
    debug_dir.mkdir(parents=True, exist_ok=True)
    path = debug_dir / f"step-{report.step:08d}-rank-{report.rank}.json"
    path.write_text(json.dumps(asdict(report), indent=1))
    shown = ", ".join(report.sample_ids[:8]) + (", ..." if len(report.sample_ids) > 8 else "")
    raise NonFiniteError(
        f"step {report.step}: {report.first_tensor} is not finite (documents: {shown}); the weights were not updated. "
        f"Debug record: {path}. Lower train.lr, look at these documents, or resume from the last checkpoint"
    )


def _first_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    return next((name for name, tensor in tensors if not torch.isfinite(tensor).all()), None)
