"""The slots in which rows are decoded, and all the memory that belongs to them."""

from dataclasses import dataclass, field

import torch

from draftsmith.algorithms.drafter import DraftState
from draftsmith.decoding.answer import Answer
from draftsmith.decoding.state import place, to_device
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.targets.cache import TargetCache


@dataclass(frozen=True)
class Slots:
    """Some neighbouring slots: their state and caches, views of a pool's storage. draft: what the drafter keeps of
    them, None without one."""

    state: DecodingState
    target_cache: TargetCache
    draft: DraftState | None


@dataclass
class SlotPool:
    """All slots. occupants: the answer that each is working on, or None; prefilling: slots whose prompt is not yet
    read; max_length: tokens that a row may have; reserved: cache entries a slot, which are more, so that a verify or a
    block that begins at a row's last token has room. unclean: slots whose last row was cut short, so that their caches
    may hold numbers that are not finite, which zero weights would not silence; they are zeroed for the next row."""

    state: DecodingState
    target_cache: TargetCache
    draft: DraftState | None
    max_length: int
    reserved: int
    occupants: list[Answer | None] = field(init=False)
    prefilling: set[int] = field(default_factory=set)
    unclean: set[int] = field(default_factory=set)
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
        slots = Slots(
            self.state.rows(begin, end),
            self.target_cache.rows(begin, end),
            None if self.draft is None else self.draft.rows(begin, end),
        )
        if begin == 0:
            self._views[begin, end] = slots
        return slots

    def place(self, begin: int, answers: list[Answer]) -> None:
        """Puts rows into the slots from `begin` on, as they are before prefill: nothing is committed to them yet."""
        for slot, answer in enumerate(answers, begin):
            self.occupants[slot] = answer
            self.prefilling.add(slot)
        # Not before: until a row is placed, steps compute the slot along, and may leave there again what its last row's
        # tokens gave.
        unclean = sorted(self.unclean.intersection(range(begin, begin + len(answers))))
        self.target_cache.erase(unclean)
        if self.draft is not None:
            self.draft.erase(unclean)
        self.unclean.difference_update(unclean)
        place(self.state, begin, answers)

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
