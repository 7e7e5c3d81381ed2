"""What a slot of a training block sees, said once and used by every way of computing attention.

A slot k of the block anchored at a sees the context strictly before a in its own document, and its own block: never
another block, never the anchor's own tapped features (methods.md section 2). Sliding layers narrow both, and causal
layers hide later slots. The dense mask and the flex_attention mask come from the same predicate.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from draftsmith.blocks.blocks import Blocks
from draftsmith.drafts.attention import AttentionKind, BlockAttention, DenseBlockAttention
from draftsmith.errors import DraftsmithError

Visibility = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query, key) -> bool, for index tensors that broadcast together."""


def visibility(blocks: Blocks, document: Tensor, kind: AttentionKind) -> Visibility:
    """The predicate of visibility under a layer's pattern.

    document [R, S] int64 as in the packed batch. Queries are the N*B slots of a row, block after block; keys are the S
    context tokens and then the same N*B slots. A block that only fills the shape sees no context.
    """
    anchors, valid = blocks.anchors, blocks.valid
    block_document = document.gather(1, anchors)  # [R, N]
    block_size = blocks.input_ids.shape[2]
    context = document.shape[1]
    window, causal = kind.window, kind.causal

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, query % block_size
        anchor = anchors[row, block]

        token = key.clamp(max=context - 1)
        in_context = (key < context) & (document[row, token] == block_document[row, block]) & (token < anchor)
        in_context = in_context & valid[row, block]

        other = (key - context).clamp(min=0)
        other_slot = other % block_size
        in_block = (key >= context) & (other // block_size == block)

        if window is not None:  # indices of one document differ as its positions do
            in_context = in_context & (anchor + slot - token < window)
            in_block = in_block & (slot - other_slot < window) & (other_slot - slot < window)
        if causal:
            in_block = in_block & (other_slot <= slot)
        return in_context | in_block

    return visible


def dense_attention(blocks: Blocks, document: Tensor, kinds: Iterable[AttentionKind]) -> DenseBlockAttention:
    """Attention under explicit masks [R, 1, N*B, S + N*B]: memory grows with queries times keys."""
    return DenseBlockAttention({kind: _dense_mask(blocks, document, kind) for kind in set(kinds)})


def _dense_mask(blocks: Blocks, document: Tensor, kind: AttentionKind) -> Tensor:
    rows, queries, keys = _extents(blocks, document)
    device = document.device
    row = torch.arange(rows, device=device).view(-1, 1, 1, 1)
    query = torch.arange(queries, device=device).view(1, 1, -1, 1)
    key = torch.arange(keys, device=device).view(1, 1, 1, -1)
    return visibility(blocks, document, kind)(row, torch.zeros_like(row), query, key)


def _extents(blocks: Blocks, document: Tensor) -> tuple[int, int, int]:
    """Rows, queries and keys of a batch's attention."""
    rows, num_blocks, block_size = blocks.input_ids.shape
    return rows, num_blocks * block_size, document.shape[1] + num_blocks * block_size


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


class FlexBlockAttention:
    """Attention by flex_attention, which skips the tiles that nobody sees and holds no mask of queries times keys.

    `masks` maps each layer's pattern to its block mask, built once a batch and shared by the layers. `compiled` says
    whether the fused kernels are used (CUDA) or the plain implementation (CPU, forward only: for comparison).
    """

    def __init__(self, masks: dict[AttentionKind, BlockMask], *, compiled: bool) -> None:
        self.masks = masks
        self._attend: Any = _compiled(flex_attention) if compiled else flex_attention

    def __call__(
        self,
        q: Tensor,
        context_k: Tensor,
        context_v: Tensor,
        block_k: Tensor,
        block_v: Tensor,
        *,
        kind: AttentionKind,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Shapes as in `BlockAttention`; raises `DraftsmithError` when there is no mask for `kind`."""
        if kind not in self.masks:
            raise DraftsmithError(f"no attention mask for layers of {kind}; masks were built for {list(self.masks)}")
        keys = torch.cat((context_k, block_k), dim=2)
        values = torch.cat((context_v, block_v), dim=2)
        shared: dict[str, Any] = {
            "block_mask": self.masks[kind],
            "scale": scale,
            "enable_gqa": q.shape[1] != keys.shape[1],
        }
        if sinks is None:
            return self._attend(q, keys, values, **shared)
        mixed, aux = self._attend(q, keys, values, return_aux=AuxRequest(lse=True), **shared)
        # One more column in the softmax, with weight exp(sink) and no value, shrinks the output by what it takes.
        kept = torch.sigmoid(aux.lse - sinks.float().view(1, -1, 1))  # [R, heads, N*B]
        return (mixed * kept.unsqueeze(-1)).to(mixed.dtype)


def flex_block_attention(
    blocks: Blocks, document: Tensor, kinds: Iterable[AttentionKind], *, compiled: bool
) -> FlexBlockAttention:
    """`FlexBlockAttention` for a packed batch; arguments as for `visibility`."""
    rows, queries, keys = _extents(blocks, document)
    build = _compiled(create_block_mask) if compiled else create_block_mask
    masks = {
        kind: build(
            visibility(blocks, document, kind), B=rows, H=None, Q_LEN=queries, KV_LEN=keys, device=document.device
        )
        for kind in set(kinds)
    }
    return FlexBlockAttention(masks, compiled=compiled)


class AttentionBackend(StrEnum):
    """How training computes attention: `dense` anywhere, `flex` on CUDA."""

    DENSE = "dense"
    FLEX = "flex"


def training_attention(
    blocks: Blocks, document: Tensor, kinds: Iterable[AttentionKind], backend: AttentionBackend
) -> BlockAttention:
    """The attention of one packed batch, by the way that is asked for.

    blocks and document [R, S] on the device of the draft; kinds: the patterns of the draft's layers.
    """
    if AttentionBackend(backend) is AttentionBackend.DENSE:
        return dense_attention(blocks, document, kinds)
    if document.device.type != "cuda":
        raise DraftsmithError(
            f"attention backend 'flex' trains on CUDA only, and the batch is on {document.device}; use 'dense'"
        )
    return flex_block_attention(blocks, document, kinds, compiled=True)
