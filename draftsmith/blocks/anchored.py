"""Training attention by a kernel of its own, made for anchored blocks (`kernels.attention.anchored_attention`)."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.visibility import block_visibility
from draftsmith.drafts.attention import AttentionInputs, AttentionKind, with_sinks
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.attention.anchored_attention import (
    AnchoredTiling,
    Operands,
    Runs,
    anchored_attention,
    anchored_tiling,
)
from draftsmith.kernels.attention.block_rows import rows_of_a_block
from draftsmith.kernels.attention.visibility import Visibility

LARGEST_HEAD = 128
"""Channels of a head that the kernel was tried with."""
LARGEST_TILE = 128
"""Rows of a tile that the kernel was tried with: a block's slots times the query heads of a key head."""
LEAST_SHARED_MEMORY = 162 * 1024
"""Bytes of shared memory for the largest of the kernel's tiles: 128 rows of queries and of their gradient, and three of
64 keys and values in flight, of 128 channels in 16 bits; A100 and H100 have them, smaller devices train with flex."""


def runs(seen: Visibility, blocks: Blocks, keys: int) -> Runs:
    """What the kernel needs of who sees what; `keys`: context tokens of a tile."""
    num_blocks, block_size = blocks.input_ids.shape[1:]
    context = seen.num_keys - num_blocks * block_size
    return Runs(
        seen.context_first.int().contiguous(),
        seen.context_end.int().contiguous(),
        (seen.block_first - context).int().contiguous(),
        (seen.block_end - context).int().contiguous(),
        _by_key(seen, blocks.valid, context, keys, block_size),
        block_size,
        keys,
    )


def _by_key(seen: Visibility, valid: Tensor, context: int, keys: int, block_size: int) -> Tensor:
    """[R, tiles, 4] int32, slots: see `Runs`. Bounds of blocks ascend along a row, so counting finds the places."""
    first = seen.context_first.unflatten(1, (-1, block_size))  # [R, N, B]
    low, high, end = first.amin(-1).unsqueeze(1), first.amax(-1).unsqueeze(1), seen.context_end[:, None, ::block_size]
    start = keys * torch.arange(-(-context // keys), device=end.device).view(1, -1, 1)
    stop = (start + keys).clamp_max(context)
    valid = valid.unsqueeze(1)
    counts = torch.stack(
        [
            (valid & (end <= start)).sum(-1),  # blocks before the first that sees any of the tile
            (valid & (low < stop)).sum(-1),
            (valid & (end < stop)).sum(-1),  # before the first that sees all of it
            (valid & (high <= start)).sum(-1),
        ],
        dim=-1,
    )
    return (counts * block_size).int().contiguous()


def takes(head_dim: int, dtype: torch.dtype, group: int, block_size: int, shared_memory: int) -> bool:
    """Whether the kernel computes such layers well: heads of a size that it was tried with, 16 bits wide, blocks that
    fit its tiles (`group`: query heads of a key head), on a device whose programs may have so many bytes of shared
    memory."""
    well = dtype in (torch.bfloat16, torch.float16) and _refusal(head_dim, group, block_size) is None
    return well and shared_memory >= LEAST_SHARED_MEMORY


def _refusal(head_dim: int, group: int, block_size: int) -> str | None:
    """Why the kernel cannot be used, None where it can."""
    if not 16 <= head_dim <= LARGEST_HEAD or head_dim & (head_dim - 1):
        return f"takes heads of 16 to {LARGEST_HEAD} channels, a power of two, and these have {head_dim}"
    rows = rows_of_a_block(group, block_size)
    if rows > LARGEST_TILE:
        return (
            f"holds a block's slots, for all query heads of a key head, in a tile of at most {LARGEST_TILE} rows, and "
            f"{block_size} slots x {group} heads, each rounded up to a power of two, make {rows}"
        )
    return None


class AnchoredBlockAttention:
    """Attention by the kernel, for all patterns of the draft's layers; see `anchored_block_attention`.

    What the kernel needs of a pattern is worked out when a layer first asks, and kept for the others.
    """

    def __init__(
        self, seen: dict[AttentionKind, Visibility], blocks: Blocks, tiles: AnchoredTiling | None = None
    ) -> None:
        self._seen = seen
        self._blocks = blocks
        self._tiles = tiles
        self._runs: dict[tuple[AttentionKind, int], Runs] = {}

    def runs(self, kind: AttentionKind, keys: int) -> Runs:
        """Of layers of this pattern, for tiles of so many keys; `DraftsmithError` for a pattern that was not named."""
        if kind not in self._seen:
            raise DraftsmithError(f"no attention runs for layers of {kind}; there are some for {list(self._seen)}")
        if (kind, keys) not in self._runs:
            self._runs[kind, keys] = runs(self._seen[kind], self._blocks, keys)
        return self._runs[kind, keys]

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Raises `DraftsmithError` for a kind without runs, and for heads or blocks that it cannot do."""
        q, sinks = inputs.q, inputs.sinks
        group, block_size = q.shape[1] // inputs.context_k.shape[1], self._blocks.input_ids.shape[-1]
        check_anchored(q.shape[-1], group, block_size)
        tiles = self._tiles or anchored_tiling(q.shape[-1], q.element_size(), rows_of_a_block(group, block_size))
        runs = self.runs(inputs.kind, tiles.keys.columns)
        operands = Operands(q, inputs.context_k, inputs.context_v, inputs.block_k, inputs.block_v)
        mixed, lse = anchored_attention(operands, runs, scale=inputs.scale, tiles=tiles)
        if sinks is None:
            return mixed
        return with_sinks(mixed, math.log(2) * lse.transpose(2, 3).flatten(1, 2), sinks)


def check_anchored(head_dim: int, group: int, block_size: int) -> None:
    """Raise `DraftsmithError` where the kernel cannot compute such layers; arguments as for `takes`."""
    if why := _refusal(head_dim, group, block_size):
        raise DraftsmithError(f"attention 'anchored' {why}; use 'flex' (train.attention=flex)")


def anchored_block_attention(
    blocks: Blocks, document: Tensor, kinds: Iterable[AttentionKind], tiles: AnchoredTiling | None = None
) -> AnchoredBlockAttention:
    """`AnchoredBlockAttention` for a packed batch; arguments as for `block_visibility`. tiles: None: as the kernel
    likes them."""
    seen = {kind: block_visibility(blocks, document, kind) for kind in set(kinds)}
    return AnchoredBlockAttention(seen, blocks, tiles)
