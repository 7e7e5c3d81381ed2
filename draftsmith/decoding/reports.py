"""What steps did, on its way to the host: copied to pinned memory behind each step, and read later."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decoding.answer import Answer


@dataclass(frozen=True)
class Pending:
    """A report on its way. lines: a copy of `DecodingState.report` in host memory; done: when it is there (None: at
    once); rows: which answer each line is about, None for slots without one; verified: made by a verify."""

    lines: Tensor
    done: "torch.cuda.Event | None"
    rows: tuple[Answer | None, ...]
    verified: bool


class Reports:
    """Reports in the order in which they were made.

    Whose slot a line is about is noted when the step is launched: by the time the line is read, the slot may belong
    to another row.
    """

    def __init__(self) -> None:
        self._pending: deque[Pending] = deque()
        self._spare: dict[torch.Size, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, report: Tensor, rows: tuple[Answer | None, ...], *, verified: bool) -> None:
        """Sends a report [slots, n] on its way to the host; arguments as in `Pending`."""
        if report.device.type != "cuda":
            self._pending.append(Pending(report.clone(), None, rows, verified))
            return
        lines = self._buffer(report)
        lines.copy_(report, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._pending.append(Pending(lines, done, rows, verified))

    def pop(self) -> tuple[list[list[int]], Pending]:
        """The oldest report, as soon as it is there: the one place where the host waits for the device."""
        pending = self._pending.popleft()
        if pending.done is not None:
            pending.done.synchronize()
            self._spare[pending.lines.shape].append(pending.lines)
        return pending.lines.tolist(), pending

    def _buffer(self, report: Tensor) -> Tensor:
        spare = self._spare.setdefault(report.shape, [])
        return spare.pop() if spare else torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
