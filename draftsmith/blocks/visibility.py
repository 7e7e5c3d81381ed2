"""What the slots of training blocks see (`kernels.attention.visibility`), from how documents and blocks lie in packed
rows.

A slot k of the block anchored at a sees the context strictly before a in its own document, and its own block: never
another block, never the anchor's own tapped features. A packed row lays documents end to end, so what a slot sees is
two runs of keys.
"""

import torch
from torch import Tensor

from draftsmith.blocks.blocks import Blocks
from draftsmith.drafts.attention import AttentionKind
from draftsmith.kernels.attention.visibility import Visibility


def block_visibility(blocks: Blocks, document: Tensor, kind: AttentionKind) -> Visibility:
    """What every slot of a packed batch sees under one layer's pattern.

    document [R, S] int64, ascending along a row, as in the packed batch.
    Queries are the N*B slots of a row; keys are the S context tokens and then the same N*B slots. A block that only
    fills the shape sees no context.
    """
    num_blocks, block_size = blocks.input_ids.shape[1:]
    context = document.shape[1]
    device = document.device
    own_document = document.gather(1, blocks.anchors)
    start = (document.unsqueeze(1) < own_document.unsqueeze(2)).sum(-1)  # [R, N], of the anchor's document
    end = torch.where(blocks.valid, blocks.anchors, start)
    return Visibility.of(
        begin=start.unsqueeze(-1),
        end=end.unsqueeze(-1),
        anchor=blocks.anchors.unsqueeze(-1),
        depth=torch.arange(block_size, device=device),
        own=context + block_size * torch.arange(num_blocks, device=device).unsqueeze(-1),  # [N, 1]
        size=block_size,
        num_keys=context + num_blocks * block_size,
        causal=kind.causal,
        window=kind.window,
    )
