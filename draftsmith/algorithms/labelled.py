"""The labels that count, taken out of their blocks and put back; and how many pass the output head at a time."""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from draftsmith.algorithms.options import Options
from draftsmith.blocks.blocks import Blocks
from draftsmith.losses.linear_cross_entropy import labelled_first, rows_at_a_time
from draftsmith.targets.ends import TargetEnds


class HeadOptions(Options):
    """What every objective over the vocabulary can be told: `head_chunk`, how many slots go through the output head at
    a time (None: half a GiB of logits)."""

    head_chunk: int | None = Field(default=None, ge=1)

    def rows_at_a_time(self, ends: TargetEnds) -> int:
        """`head_chunk`, or what the head's vocabulary and dtype allow."""
        return self.head_chunk or rows_at_a_time(ends.vocab_size, ends.head_weight.dtype)


@dataclass(frozen=True)
class Chosen:
    """Some of a micro-batch's labels, or of its blocks: all that have a label that counts come first, in order, and
    others may follow (so that the host need not know how many there are).

    index [m] int64, into the flattened labels [R*N*P] or blocks [R*N]; label_mask [R, N, P] bool; depth: leading
    dimensions that the index runs over, 3 for labels and 2 for blocks.
    """

    index: Tensor
    label_mask: Tensor
    depth: int

    @classmethod
    def labels(cls, blocks: Blocks) -> "Chosen":
        """The labels that count."""
        return cls(labelled_first(blocks.label_mask, blocks.max_labels), blocks.label_mask, 3)

    @classmethod
    def blocks(cls, blocks: Blocks) -> "Chosen":
        """The blocks that have a label that counts."""
        some = blocks.label_mask.any(-1)
        return cls(labelled_first(some, min(some.numel(), blocks.max_labels)), blocks.label_mask, 2)

    def take(self, values: Tensor) -> Tensor:
        """[R, N, P, ...] -> [m, ...] for labels; [R, N, ...] -> [m, ...] for blocks."""
        return values.flatten(0, self.depth - 1).index_select(0, self.index)

    def spread(self, values: Tensor) -> Tensor:
        """[m] of labels, or [m, P] of blocks -> [R, N, P] in the dtype of `values`, 0 at labels that do not count."""
        shape = self.label_mask.shape
        spread = values.new_zeros(shape).flatten(0, self.depth - 1).index_copy(0, self.index, values)
        return torch.where(self.label_mask, spread.view(shape), 0)
