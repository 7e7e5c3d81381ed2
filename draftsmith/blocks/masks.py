"""Ways of computing the attention of training blocks: dense masks, flex_attention's tiles, and the choice.

Who sees whom is said in `blocks.visibility`; everything here follows from that.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from draftsmith.blocks.anchored import anchored_block_attention
from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.visibility import block_visibility
from draftsmith.drafts.attention import AttentionInputs, AttentionKind, BlockAttention, DenseBlockAttention, with_sinks
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.attention.visibility import Visibility

TILE = 128
"""Queries and keys of one tile of flex_attention."""


# --- dense ----------------------------------------------------------------------------------------------------------


def dense_attention(blocks: Blocks, document: Tensor, kinds: Iterable[AttentionKind]) -> DenseBlockAttention:
    """Attention under explicit masks [R, 1, N*B, S + N*B]: memory grows with queries times keys."""
    return DenseBlockAttention({kind: block_visibility(blocks, document, kind).mask() for kind in set(kinds)})


# --- flex_attention -------------------------------------------------------------------------------------------------


def flex_mask(seen: Visibility) -> BlockMask:
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
    context_first, context_end, block_first, block_end = (bound.int() for bound in seen.runs())
    narrow = Visibility(context_first, context_end, block_first, block_end, seen.num_keys)

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

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Raises `DraftsmithError` when there is no mask for the inputs' kind."""
        q, kind, sinks = inputs.q, inputs.kind, inputs.sinks
        if kind not in self.masks:
            raise DraftsmithError(f"no attention mask for layers of {kind}; masks were built for {list(self.masks)}")
        keys, values = inputs.joined()
        shared: dict[str, Any] = {
            "block_mask": self.masks[kind],
            "scale": inputs.scale,
            "enable_gqa": q.shape[1] != keys.shape[1],
        }
        if sinks is None:
            return self._attend(q, keys, values, **shared)
        mixed, aux = self._attend(q, keys, values, return_aux=AuxRequest(lse=True), **shared)
        return with_sinks(mixed, aux.lse, sinks)


def flex_block_attention(
    blocks: Blocks, document: Tensor, kinds: Iterable[AttentionKind], *, compiled: bool
) -> FlexBlockAttention:
    """`FlexBlockAttention` for a packed batch; arguments as for `block_visibility`."""
    masks = {kind: flex_mask(block_visibility(blocks, document, kind)) for kind in set(kinds)}
    return FlexBlockAttention(masks, compiled=compiled)


# --- the choice -----------------------------------------------------------------------------------------------------


class AttentionBackend(StrEnum):
    """How training computes attention: `dense` anywhere; on CUDA `flex`, or `anchored`, kernels for these masks."""

    DENSE = "dense"
    FLEX = "flex"
    ANCHORED = "anchored"


def training_attention(
    blocks: Blocks, document: Tensor, kinds: Iterable[AttentionKind], backend: AttentionBackend
) -> BlockAttention:
    """The attention of one packed batch, by the way that is asked for.

    blocks and document [R, S] on the device of the draft; kinds: the patterns of the draft's layers.
    """
    backend = AttentionBackend(backend)
    if backend is AttentionBackend.DENSE:
        return dense_attention(blocks, document, kinds)
    if document.device.type != "cuda":
        raise DraftsmithError(
            f"attention backend '{backend}' trains on CUDA only, and the batch is on {document.device}; use 'dense'"
        )
    if backend is AttentionBackend.ANCHORED:
        return anchored_block_attention(blocks, document, kinds)
    return flex_block_attention(blocks, document, kinds, compiled=True)
