"""The state of the slots: a few tensors on the device, at fixed addresses, changed in place, with no look from the
host."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftsmith.decoding.answer import Answer
from draftsmith.decoding.sampling import RowSampling, SamplingBounds
from draftsmith.kernels.state import slot_state
from draftsmith.kernels.state.slot_state import COMMITTED, REPORT_HEADER


@dataclass(frozen=True)
class DecodingState:
    """One row a slot. Every length is a counter; what lies in `tokens` past `length` means nothing.

    tokens [slots, max_length + width] int64, prompt and committed tokens; length [slots] int64, how many of them
    count: the last one, at length - 1, is the anchor, and has not been through the target. limit [slots] int64, the
    length at which the row ends; finished [slots] bool: nothing is committed to the row (so also while its prompt is
    being read, and in a slot without a row); stopped [slots] bool, finished by a stop token. read [slots] int64, how
    far the prompt has been through the models, in whole passes, so perhaps past its end. seeds [slots] int64;
    stop_ids [slots, n] int64, of which stop_count [slots] int64 count; temperature, top_k, top_p [slots] as in
    `RowSampling`. invalid_target and invalid_draft [slots] bool: the row met logits of the target, or states of the
    draft, that are not finite. report [slots, REPORT_HEADER + width] int64: what the last commit did, for the host.
    """

    tokens: Tensor
    length: Tensor
    limit: Tensor
    finished: Tensor
    stopped: Tensor
    read: Tensor
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

    def sampling(self, bounds: SamplingBounds) -> RowSampling:
        """Each row's sampling options."""
        return RowSampling(self.temperature, self.top_k, self.top_p, bounds)

    def place(self, first: int, answers: Sequence[Answer]) -> None:
        """Puts rows into the slots from `first` on, as they are before their prompts are read."""
        packed = slot_state.pack_rows(
            [
                (
                    len(a.prompt),
                    a.limit,
                    a.seed,
                    len(a.stop_token_ids),
                    chosen.top_k,
                    chosen.fp32_temperature,
                    chosen.top_p,
                )
                for a in answers
                for chosen in (a.sampling,)
            ],
            [answer.stop_token_ids for answer in answers],
            [answer.prompt for answer in answers],
        )
        slot_state.place_rows(
            to_device(packed, self.length.device),
            first,
            max(len(answer.stop_token_ids) for answer in answers),
            tokens=self.tokens,
            length=self.length,
            limit=self.limit,
            finished=self.finished,
            stopped=self.stopped,
            read=self.read,
            seeds=self.seeds,
            stop_ids=self.stop_ids,
            stop_count=self.stop_count,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            invalid_target=self.invalid_target,
            invalid_draft=self.invalid_draft,
        )

    def prompt(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The next `width` tokens of each prompt: ids and positions, both [slots, width] int64, and how many of them
        are the prompt's own [slots] int64; the rest is padding."""
        return slot_state.read_prompt(self.tokens, self.length, self.read, width=width)

    @property
    def committed(self) -> Tensor:
        """How many tokens the last commit appended to each row [slots] int64."""
        return self.report[:, COMMITTED]

    def open(self, *, width: int, own: int, ids: int, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a step begins with, all int64: anchors [slots], the positions of the last tokens; ids [slots, ids], the
        last token and then zeros; the positions of the verify [slots, width], all below `window`; and how many of its
        tokens are a row's own [slots]: at most `own`, 0 in finished rows.

        A token at the last position of the target's window decides nothing any more, so all that would lie beyond it
        is said to be there, and is not the row's own. Several tokens may then fall on that one position; whichever of
        them its cache entries come from, no query that counts sees them.
        """
        return slot_state.open_step(
            self.tokens, self.length, self.finished, width=width, own=own, block=ids, filler=0, window=window
        )

    def mark_draft(self, states: Tensor) -> None:
        """Marks rows whose states of the draft [slots, ...] are not finite."""
        slot_state.mark_not_finite(states, self.finished, self.invalid_draft)

    def commit(self, token_ids: Tensor, count: Tensor | None, finite: Tensor, proposed: Tensor | None = None) -> None:
        """Appends what a verify grants, up to the first stop token (kept) and to the limit, and reports it.

        Arguments as in `kernels.state.slot_state.commit`.
        """
        slot_state.commit(
            token_ids,
            count,
            proposed,
            finite,
            tokens=self.tokens,
            length=self.length,
            limit=self.limit,
            finished=self.finished,
            stopped=self.stopped,
            stop_ids=self.stop_ids,
            stop_count=self.stop_count,
            invalid_target=self.invalid_target,
            invalid_draft=self.invalid_draft,
            report=self.report,
        )


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
