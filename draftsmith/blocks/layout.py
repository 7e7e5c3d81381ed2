"""Which slot of a block predicts which token: the one owner of that fact."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError


class BlockKind(StrEnum):
    """How slots and tokens line up.

    `anchor_known`: slot 0 carries the anchor, slot k >= 1 predicts token a+k.
    `anchor_first`: the anchor's own slot already predicts; slot k >= 0 predicts token a+k+1.
    """

    ANCHOR_KNOWN = "anchor_known"
    ANCHOR_FIRST = "anchor_first"


@dataclass(frozen=True)
class BlockLayout:
    """The geometry of a block of `block_size` slots anchored at position `a`.

    Label `j` (0-based, `num_labels` of them) is the token at position a+1+j in every kind; only the slot that predicts
    it differs. Everything else (labels, proposals, verify width, metrics) follows from that.
    """

    kind: BlockKind
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise DraftsmithError(f"block_size is {self.block_size}; a block needs at least 2 slots")

    @property
    def first_predicting_slot(self) -> int:
        """The slot that predicts label 0."""
        return 1 if self.kind is BlockKind.ANCHOR_KNOWN else 0

    @property
    def num_labels(self) -> int:
        """Labels, and therefore proposals, per block: B-1 or B."""
        return self.block_size - self.first_predicting_slot

    @property
    def max_proposals(self) -> int:
        """The most tokens one block can propose."""
        return self.num_labels

    def verify_width(self, num_proposals: int) -> int:
        """Tokens in one verify: the anchor and the proposals."""
        return 1 + num_proposals

    def label_positions(self, anchors: Tensor) -> Tensor:
        """Positions of the labels of blocks anchored at `anchors`: [...] int64 -> [..., num_labels] int64."""
        return anchors.unsqueeze(-1) + 1 + torch.arange(self.num_labels, device=anchors.device)

    def predicting(self, slots: Tensor, dim: int) -> Tensor:
        """The predicting slots of a tensor whose dimension `dim` runs over slots: size B -> size num_labels."""
        return slots.narrow(dim, self.first_predicting_slot, self.num_labels)
