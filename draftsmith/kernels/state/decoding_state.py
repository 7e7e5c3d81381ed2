"""The state of the slots: a few tensors on the device, at fixed addresses, changed in place, with no look from the
host. What changes them: `place_rows`, `read_prompt`, `open_step`, `mark_not_finite` and `commit`, a launch each."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftsmith.kernels.state.report import COMMITTED, REPORT_HEADER


@dataclass(frozen=True)
class DecodingState:
    """One row a slot. Every length is a counter; what lies in `tokens` past `length` means nothing."""

    tokens: Tensor
    """[slots, max_length + width] int64: prompt and committed tokens."""
    length: Tensor
    """[slots] int64: how many tokens count. The last one, at length - 1, is the anchor, and has not been through the
    target."""
    limit: Tensor
    """[slots] int64: the length at which the row ends."""
    finished: Tensor
    """[slots] bool: nothing is committed to the row (so also while its prompt is read, and in a slot without a row)."""
    stopped: Tensor
    """[slots] bool: finished by a stop token."""
    read: Tensor
    """[slots] int64: how far the prompt has been through the models, in whole passes, so perhaps past its end."""
    seeds: Tensor
    """[slots] int64."""
    stop_ids: Tensor
    """[slots, n] int64."""
    stop_count: Tensor
    """[slots] int64: how many of the stop ids count."""
    temperature: Tensor
    """[slots] fp32; 0: the row takes its most likely token."""
    top_k: Tensor
    """[slots] int64; 0: all tokens."""
    top_p: Tensor
    """[slots] fp64."""
    invalid_target: Tensor
    """[slots] bool: the row met logits of the target that are not finite."""
    invalid_draft: Tensor
    """[slots] bool: the row met states of the draft that are not finite."""
    report: Tensor
    """[slots, REPORT_HEADER + width] int64: what the last commit did, for the host (`report`)."""

    @classmethod
    def empty(
        cls, slots: int, max_length: int, width: int, stop_capacity: int, device: torch.device
    ) -> "DecodingState":
        """Slots without rows. width: the widest verify; stop_capacity: room for stop ids of a row."""

        def numbers(*shape: int, value: int = 0) -> Tensor:
            return torch.full((slots, *shape), value, dtype=torch.int64, device=device)

        def flags(value: bool = False) -> Tensor:
            return torch.full((slots,), value, dtype=torch.bool, device=device)

        return cls(
            tokens=numbers(max_length + width),
            length=numbers(value=1),
            limit=numbers(value=1),
            finished=flags(True),
            stopped=flags(),
            read=numbers(),
            seeds=numbers(),
            stop_ids=numbers(stop_capacity),
            stop_count=numbers(),
            temperature=torch.zeros(slots, device=device),
            top_k=numbers(),
            top_p=torch.ones(slots, dtype=torch.float64, device=device),
            invalid_target=flags(),
            invalid_draft=flags(),
            report=numbers(REPORT_HEADER + width),
        )

    def rows(self, begin: int, end: int) -> "DecodingState":
        """The same storage, seen for these slots only."""
        return DecodingState(**{field.name: getattr(self, field.name)[begin:end] for field in fields(self)})

    @property
    def committed(self) -> Tensor:
        """How many tokens the last commit appended to each row [slots] int64."""
        return self.report[:, COMMITTED]
