"""What a slot of a training block sees, said once and used by every way of computing attention.

A slot k of the block anchored at a sees the context strictly before a in its own document, and its own block: never
another block, never the anchor's own tapped features. Sliding layers narrow both, causal layers hide later slots. A
packed row lays documents end to end, so what a slot sees is two runs of keys; the dense mask, the flex_attention mask
and its tiles all follow from those.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from draftsmith.blocks.blocks import Blocks
from draftsmith.drafts.attention import AttentionKind, BlockAttention, DenseBlockAttention
from draftsmith.errors import DraftsmithError

TILE = 128
"""Queries and keys of one tile of flex_attention."""


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


# --- dense ----------------------------------------------------------------------------------------------------------


def dense_attention(blocks: Blocks, document: Tensor, kinds: Iterable[AttentionKind]) -> DenseBlockAttention:
    """Attention under explicit masks [R, 1, N*B, S + N*B]: memory grows with queries times keys."""
    return DenseBlockAttention({kind: dense_mask(sight(blocks, document, kind)) for kind in set(kinds)})


def dense_mask(seen: Sight) -> Tensor:
    """[R, 1, N*B, S + N*B] bool, True where the query sees the key."""
    rows, queries = seen.context_end.shape
    device = seen.context_end.device
    row = torch.arange(rows, device=device).view(-1, 1, 1, 1)
    query = torch.arange(queries, device=device).view(1, 1, -1, 1)
    key = torch.arange(seen.num_keys, device=device).view(1, 1, 1, -1)
    return seen.sees(row, query, key)


# --- flex_attention -------------------------------------------------------------------------------------------------


def flex_mask(seen: Sight) -> BlockMask:
    """The tiles of queries x keys that flex_attention has to compute, from the runs alone."""
    rows, queries = seen.context_end.shape
    device = seen.context_end.device
    first = TILE * torch.arange(-(-seen.num_keys // TILE), device=device)  # [T], of each tile of keys
    end = first + TILE
    any_seen = torch.zeros(rows, queries, len(first), dtype=torch.bool, device=device)
    all_seen = any_seen
    for run_first, run_end in ((seen.context_first, seen.context_end), (seen.block_first, seen.block_end)):
        run_first, run_end = run_first.unsqueeze(-1), run_end.unsqueeze(-1)  # [R, Q, 1]
        any_seen = any_seen | (torch.maximum(run_first, first) < torch.minimum(run_end, end))
        all_seen = all_seen | ((run_first <= first) & (run_end >= end))
    # Over the queries of a tile; those past the last one see nothing, so their tile is never whole.
    padding = (0, 0, 0, -queries % TILE)
    some = torch.nn.functional.pad(any_seen, padding).unflatten(1, (-1, TILE)).any(2)  # [R, Q tiles, T]
    whole = torch.nn.functional.pad(all_seen, padding).unflatten(1, (-1, TILE)).all(2)

    # Read for every pair of a tile that is not whole: as narrow as they can be.
    narrow = Sight(*(each.int() for each in seen.runs()), seen.num_keys)

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return narrow.sees(row, query, key)

    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(queries, seen.num_keys),
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """[R, Q tiles, T] bool -> key tiles that each query tile has: their number [R, 1, Q tiles], and [..., T] the tiles,
    those first."""
    order = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    # With fullgraph, too many recompilations raise an error; without it they would end in the unfused implementation.
    # The first shapes are compiled as they are; when others follow, once more for any.
    return torch.compile(flex_attention, fullgraph=True)


class FlexBlockAttention:
    """Attention by flex_attention, which skips the tiles that nobody sees and holds no mask of queries x keys.

    `masks` maps each layer's pattern to its block mask, built once a batch and shared by the layers. `compiled` says
    whether the fused kernels are used (CUDA) or the plain implementation (CPU, forward only: for comparison).
    """

    def __init__(self, masks: dict[AttentionKind, BlockMask], *, compiled: bool) -> None:
        self.masks = masks
        self._attend: Any = _compiled_flex_attention() if compiled else flex_attention

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
    """`FlexBlockAttention` for a packed batch; arguments as for `sight`."""
    masks = {kind: flex_mask(sight(blocks, document, kind)) for kind in set(kinds)}
    return FlexBlockAttention(masks, compiled=compiled)


# --- the choice -----------------------------------------------------------------------------------------------------


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
