"""Tentative tokens of recurrent layers: how many of the last pass's tokens stand, and where they lie.

A recurrent state cannot be cut back to an earlier position. So a tentative pass (a verify) leaves the state alone
and keeps its tokens' inputs. Once it is known how many of them stand, the next pass first advances the state over
those. A state is then read and written once a pass, whatever the width of a verify. The usual way, one stored
state a token, writes `width` times as much.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Standing:
    """Which tentative tokens stand, the same for all recurrent layers of a cache.

    count [slots] int64: number of the kept tokens that stand and that the states do not hold yet. half [slots] int64, 0
    or 1: of the two halves of every buffer [slots, 2, ...], the one that the next pass reads; it writes the other, so
    that no program of a kernel reads what another one writes.
    """

    count: Tensor
    half: Tensor

    @classmethod
    def none(cls, slots: int, device: torch.device | str) -> "Standing":
        """Nothing is kept yet."""
        return cls(*(torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(2)))

    def rows(self, begin: int, end: int) -> "Standing":
        """The same storage, seen for slots begin .. end - 1 only."""
        return Standing(self.count[begin:end], self.half[begin:end])

    def passed(self, count: Tensor | int) -> None:
        """After a pass: the next one reads what this one wrote, and `count` of its tokens (tensor [slots] int64, or 0
        after a pass that was not tentative) are still to be added to the states."""
        self.half.bitwise_xor_(1)
        if isinstance(count, int):
            self.count.fill_(count)
        else:
            self.count.copy_(count)


@dataclass(frozen=True)
class Pass:
    """What a recurrent layer has to know of a pass over `w` new tokens of each slot.

    begins [slots] bool: the pass begins a text, so nothing of the slot's former text may show. valid [slots] int64:
    number of leading tokens that are the slot's own; None: all. tentative: the states do not advance over the pass's
    tokens, which are kept instead; `Standing.passed` says later how many of them stand.
    """

    begins: Tensor
    valid: Tensor | None
    tentative: bool
