"""What a slot of a training block sees, said once and used by every way of computing attention.

A slot k of the block anchored at a sees the context strictly before a in its own document, and its own block: never
another block, never the anchor's own tapped features. Sliding layers narrow both, causal layers hide later slots. A
packed row lays documents end to end, so what a slot sees is two runs of keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.blocks.blocks import Blocks
from draftsmith.drafts.attention import AttentionKind


@dataclass(frozen=True)
class Sight:
    """The keys that each query sees under one layer's pattern: two runs, first index and end, each [R, N*B] int64.

    Queries are the N*B slots of a row, block after block; keys are the S context tokens and then the same N*B slots.
    An empty run has its end at or before its first index.
    """

    context_first: Tensor
    context_end: Tensor
    block_first: Tensor
    block_end: Tensor
    num_keys: int

    def runs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four bounds, in the order of the fields."""
        return self.context_first, self.context_end, self.block_first, self.block_end

    def sees(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The predicate of visibility, for index tensors that broadcast together -> bool."""
        in_context = (key >= self.context_first[row, query]) & (key < self.context_end[row, query])
        in_block = (key >= self.block_first[row, query]) & (key < self.block_end[row, query])
        return in_context | in_block


def sight(blocks: Blocks, document: Tensor, kind: AttentionKind) -> Sight:
    """What every slot of a packed batch sees. document [R, S] int64, ascending along a row, as in the packed batch.

    A sliding layer of window W sees keys nearer than W, both ways inside the block (unless causal); a block that only
    fills the shape sees no context.
    """
    num_blocks, block_size = blocks.input_ids.shape[1:]
    context = document.shape[1]
    own_document = document.gather(1, blocks.anchors)
    start = (document.unsqueeze(1) < own_document.unsqueeze(2)).sum(-1)  # [R, N], of the anchor's document
    end = torch.where(blocks.valid, blocks.anchors, start)

    slot = torch.arange(block_size, device=document.device)
    context_first = start.unsqueeze(-1).expand(-1, -1, block_size)  # [R, N, B]
    context_end = end.unsqueeze(-1).expand(-1, -1, block_size)
    block_first = torch.zeros_like(slot)
    block_end = slot + 1 if kind.causal else torch.full_like(slot, block_size)
    if kind.window is not None:
        context_first = torch.maximum(context_first, blocks.anchors.unsqueeze(-1) + slot - (kind.window - 1))
        block_first = (slot - (kind.window - 1)).clamp(min=0)
        block_end = torch.minimum(block_end, slot + kind.window)

    own = context + block_size * torch.arange(num_blocks, device=document.device).unsqueeze(-1)  # [N, 1]
    return Sight(
        context_first.flatten(1),
        context_end.flatten(1),
        (own + block_first).flatten().expand(len(document), -1),
        (own + block_end).flatten().expand(len(document), -1),
        context + num_blocks * block_size,
    )
