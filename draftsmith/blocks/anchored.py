"""Training attention by a kernel of its own, made for anchored blocks (`kernels.anchored_attention`)."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.sight import Sight, sight
from draftsmith.drafts.attention import AttentionKind, with_sinks
from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.kernels.anchored_attention import Runs


def runs(seen: Sight, blocks: Blocks, keys: int) -> "Runs":
    """What the kernel needs of who sees what; `keys`: context tokens of a tile."""
    from draftsmith.kernels.anchored_attention import Runs

    num_blocks, block_size = blocks.input_ids.shape[1:]
    context = seen.num_keys - num_blocks * block_size
    return Runs(
        seen.context_first.int().contiguous(),
        seen.context_end.int().contiguous(),
        (seen.block_first - context).int().contiguous(),
        (seen.block_end - context).int().contiguous(),
        _by_key(seen, blocks.valid, context, keys, block_size),
        block_size,
    )


def _by_key(seen: Sight, valid: Tensor, context: int, keys: int, block_size: int) -> Tensor:
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


def anchored_attention(
    blocks: Blocks, document: Tensor, kinds: Iterable[AttentionKind], keys: int | None = None
) -> "AnchoredBlockAttention":
    """`AnchoredBlockAttention` for a packed batch; arguments as for `sight`. keys: context tokens of a tile (None: as
    the kernel likes them)."""
    from draftsmith.kernels.anchored_attention import KEYS

    return AnchoredBlockAttention(
        {kind: runs(sight(blocks, document, kind), blocks, KEYS if keys is None else keys) for kind in set(kinds)}
    )


def takes(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel computes heads of this size and dtype well: powers of two, 16 bits wide."""
    return 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0 and dtype in (torch.bfloat16, torch.float16)


class AnchoredBlockAttention:
    """Attention by the kernel, for all patterns of the draft's layers; `runs` holds each pattern's."""

    def __init__(self, runs: "dict[AttentionKind, Runs]") -> None:
        self.runs = runs

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
        """Shapes as in `BlockAttention`; raises `DraftsmithError` for a kind without runs or a head it cannot do."""
        from draftsmith.kernels.anchored_attention import anchored_attention

        if q.shape[-1] < 16 or q.shape[-1] & (q.shape[-1] - 1):
            raise DraftsmithError(
                f"attention 'anchored' takes heads of a power of two of at least 16 channels, and these have "
                f"{q.shape[-1]}; use 'flex'"
            )
        if kind not in self.runs:
            raise DraftsmithError(f"no attention runs for layers of {kind}; there are some for {list(self.runs)}")
        mixed, lse = anchored_attention(q, context_k, context_v, block_k, block_v, self.runs[kind], scale=scale)
        if sinks is None:
            return mixed
        return with_sinks(mixed, math.log(2) * lse, sinks)
