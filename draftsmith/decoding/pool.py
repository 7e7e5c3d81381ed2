"""The slots in which rows are decoded, and all the memory that belongs to them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.decoding.answer import Answer
from draftsmith.decoding.cache import ContextCache
from draftsmith.decoding.state import DecodingState
from draftsmith.targets.cache import KeyValueCache


@dataclass(frozen=True)
class Slots:
    """Some neighbouring slots: their state and caches, views of a pool's storage."""

    state: DecodingState
    target_cache: KeyValueCache
    context: ContextCache | None


@dataclass
class SlotPool:
    """All slots. occupants: the answer that each is working on, or None; prefilling: slots whose prompt is not yet
    read; max_length: tokens that a row may have; reserved: cache entries a slot, which are more, so that a verify or a
    block that begins at a row's last token has room."""

    state: DecodingState
    target_cache: KeyValueCache
    context: ContextCache | None
    max_length: int
    reserved: int
    occupants: list[Answer | None] = field(init=False)
    prefilling: set[int] = field(default_factory=set)
    _views: dict[tuple[int, int], Slots] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.occupants = [None] * self.size

    @property
    def size(self) -> int:
        """Slots."""
        return len(self.state.length)

    @property
    def readable(self) -> int:
        """Positions of a row that a pass over prompts may touch, padding included: it has ids and cache entries."""
        return min(self.reserved, self.state.tokens.shape[1])

    @property
    def idle(self) -> bool:
        """Whether no slot is in use."""
        return not any(self.occupants)

    def free_slots(self) -> list[int]:
        """Slots without a row, lowest first."""
        return [slot for slot, answer in enumerate(self.occupants) if answer is None]

    def rows(self, begin: int, end: int) -> Slots:
        """Slots begin .. end - 1. The views of steps, which begin at 0, are made once: they are many small objects."""
        if begin == 0 and (begin, end) in self._views:
            return self._views[begin, end]
        cache = self.target_cache
        slots = Slots(
            self.state.rows(begin, end),
            KeyValueCache([keys[begin:end] for keys in cache.keys], [values[begin:end] for values in cache.values]),
            None if self.context is None else self.context.rows(begin, end),
        )
        if begin == 0:
            self._views[begin, end] = slots
        return slots

    def place(self, begin: int, answers: list[Answer]) -> None:
        """Puts rows into the slots from `begin` on, as they are before prefill: nothing is committed to them yet."""
        state = self.state
        end = begin + len(answers)
        for slot, answer in enumerate(answers, begin):
            self.occupants[slot] = answer
            self.prefilling.add(slot)
        tokens = _padded([answer.prompt for answer in answers])
        stop_ids = _padded([answer.stop_token_ids for answer in answers])
        fill(state.tokens[begin:end, : tokens.shape[1]], tokens)
        fill(state.stop_ids[begin:end, : stop_ids.shape[1]], stop_ids)
        columns: list[tuple[Tensor, list[float] | list[int]]] = [
            (state.length, [len(answer.prompt) for answer in answers]),
            (state.limit, [answer.limit for answer in answers]),
            (state.seeds, [answer.seed for answer in answers]),
            (state.stop_count, [len(answer.stop_token_ids) for answer in answers]),
            (state.temperature, [answer.sampling.fp32_temperature for answer in answers]),
            (state.top_k, [answer.sampling.top_k for answer in answers]),
            (state.top_p, [answer.sampling.top_p for answer in answers]),
        ]
        for tensor, values in columns:
            fill(tensor[begin:end], torch.tensor(values, dtype=tensor.dtype))
        state.read[begin:end].zero_()
        for flags in (state.stopped, state.invalid_target, state.invalid_draft):
            flags[begin:end].fill_(False)
        state.finished[begin:end].fill_(True)

    def release(self, slots: list[int]) -> None:
        """Takes rows out. What steps still compute for their slots lies at the very beginning of the caches."""
        if not slots:
            return
        index = to_device(torch.tensor(slots), self.state.length.device)
        self.state.finished.index_fill_(0, index, True)
        self.state.length.index_fill_(0, index, 1)
        self.state.limit.index_fill_(0, index, 1)
        for slot in slots:
            self.occupants[slot] = None
            self.prefilling.discard(slot)

    def erase(self, slot: int) -> None:
        """Zeroes a slot's caches: after a row whose numbers were not finite, which zero weights would not silence."""
        for tensor in (*self.target_cache.keys, *self.target_cache.values):
            tensor[slot].zero_()
        if self.context is not None:
            self.context.storage[:, :, slot].zero_()


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """[len(rows), longest] int64, zeros behind the shorter ones."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int64)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def fill(target: Tensor, values: Tensor) -> None:
    """Overwrites a device tensor with values of the host, without waiting for the device."""
    target.copy_(values.pin_memory() if target.device.type == "cuda" else values, non_blocking=True)
