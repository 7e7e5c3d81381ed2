"""All memory of the slots in which rows are decoded."""

from collections.abc import Sequence
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
    """All slots."""

    state: DecodingState
    target_cache: TargetCache
    draft: DraftState | None
    _views: dict[tuple[int, int], Slots] = field(default_factory=dict)

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

    def place(self, first: int, answers: Sequence[Answer], unclean: Sequence[int] = ()) -> None:
        """Puts rows into the slots from `first` on, as they are before prefill: nothing is committed to them yet.

        unclean: those of the slots whose caches may hold numbers that are not finite; they are zeroed. Not before:
        until a row is placed, steps compute the slot along, and may leave there again what its last row's tokens gave.
        """
        self.target_cache.erase(unclean)
        if self.draft is not None:
            self.draft.erase(unclean)
        place(self.state, first, answers)

    def release(self, slots: Sequence[int]) -> None:
        """Takes rows out. What steps still compute for their slots lies at the very beginning of the caches."""
        if not slots:
            return
        index = to_device(torch.tensor(list(slots)), self.state.length.device)
        self.state.finished.index_fill_(0, index, True)
        self.state.length.index_fill_(0, index, 1)
        self.state.limit.index_fill_(0, index, 1)
