"""The state of the slots: a few tensors on the device, at fixed addresses, changed in place, with no look from the
host."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftsmith.decoding.sampling import RowSampling, SamplingBounds
from draftsmith.decoding.verify import Verdict

REPORT_HEADER = 3
"""Numbers of a report before its tokens: the row's length, how many tokens the step committed, and the flags."""

FINISHED, STOPPED, INVALID_TARGET, INVALID_DRAFT = 1, 2, 4, 8
"""Flags of a report, added up."""


@dataclass(frozen=True)
class DecodingState:
    """One row a slot. Every length is a counter; what lies in `tokens` past `length` means nothing.

    tokens [slots, max_length + width] int64, prompt and committed tokens; length [slots] int64, how many of them
    count: the last one, at length - 1, is the anchor, and has not been through the target. limit [slots] int64, the
    length at which the row ends; finished [slots] bool: nothing is committed to the row (so also while its prompt is
    being read, and in a slot without a row); stopped [slots] bool, finished by a stop token. seeds [slots] int64;
    stop_ids [slots, n] int64, of which stop_count [slots] int64 count; temperature, top_k, top_p [slots] as in
    `RowSampling`. invalid_target and invalid_draft [slots] bool: the row met logits of the target, or states of the
    draft, that are not finite. report [slots, REPORT_HEADER + width] int64: what the last commit did, for the host.
    """

    tokens: Tensor
    length: Tensor
    limit: Tensor
    finished: Tensor
    stopped: Tensor
    seeds: Tensor
    stop_ids: Tensor
    stop_count: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    invalid_target: Tensor
    invalid_draft: Tensor
    report: Tensor

    @classmethod
    def empty(
        cls, slots: int, max_length: int, width: int, stop_capacity: int, device: torch.device
    ) -> "DecodingState":
        """Slots without rows. width: the widest verify; stop_capacity: room for so many stop ids a row."""

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
    def anchor(self) -> Tensor:
        """Position of the last committed token: [slots] int64."""
        return self.length - 1

    @property
    def anchor_ids(self) -> Tensor:
        """The last committed token: [slots] int64."""
        return self.tokens.gather(1, self.anchor[:, None])[:, 0]

    def sampling(self, bounds: SamplingBounds) -> RowSampling:
        """Each row's sampling options."""
        return RowSampling(self.temperature, self.top_k, self.top_p, bounds)

    def verify_positions(self, width: int, window: int) -> Tensor:
        """Positions of the anchor and the width - 1 tokens after it: [slots, width] int64, all below `window`.

        A token at the last position of the target's window decides nothing any more, so all that would lie beyond it
        is said to be there. Several tokens may then fall on that one position; whichever of them its cache entries
        come from, no query that counts sees them.
        """
        steps = torch.arange(width, device=self.length.device)
        return (self.anchor[:, None] + steps).clamp(max=window - 1)

    def commit(self, verdict: Verdict) -> Tensor:
        """Appends what a verdict grants: at most up to the first stop token (kept) and to the limit; and reports it.

        Returns the number of tokens committed, [slots] int64: 0 for finished rows, at least 1 for the others (unless
        the verdict's count is 0).
        """
        width = verdict.token_ids.shape[1]
        index = torch.arange(width, device=self.length.device)
        room = torch.minimum(verdict.count, self.limit - self.length)
        is_stop_id = verdict.token_ids.unsqueeze(-1) == self.stop_ids[:, None]  # [slots, width, n]
        counts = torch.arange(self.stop_ids.shape[1], device=self.length.device) < self.stop_count[:, None]
        is_stop = (is_stop_id & counts[:, None]).any(-1) & (index < room[:, None])  # [slots, width]
        before_stop = (is_stop.long().cumsum(-1) == 0).long().sum(-1)  # width when there is none
        stops = is_stop.any(-1) & ~self.finished
        committed = torch.minimum(room, before_stop + 1).masked_fill(self.finished, 0)

        # Whole blocks are written; the length says what counts.
        self.tokens.scatter_(1, self.length[:, None] + index, verdict.token_ids)
        self.length.add_(committed)
        self.stopped.logical_or_(stops)
        invalid = self.invalid_target | self.invalid_draft
        self.finished.logical_or_(self.stopped | (self.length >= self.limit) | invalid)

        flags = FINISHED * self.finished.long() + STOPPED * self.stopped.long()
        flags = flags + INVALID_TARGET * self.invalid_target.long() + INVALID_DRAFT * self.invalid_draft.long()
        header = torch.stack((self.length, committed, flags), dim=1)
        self.report[:, : REPORT_HEADER + width].copy_(torch.cat((header, verdict.token_ids), dim=1))
        return committed
