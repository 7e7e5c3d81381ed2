"""The draft's context during decoding: keys and values of verified tokens, and who sees them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.drafts.attention import AttentionKind, DenseBlockAttention
from draftsmith.drafts.draft import Draft


class ContextCache:
    """Static keys and values of every draft layer: per layer two tensors [batch, kv_heads, max_length, d].

    An entry is placed by its position, and counts for a block when its position is below the block's anchor. What a
    rejected proposal left behind lies at or past the next anchor, and is overwritten before the anchor passes it.
    """

    def __init__(self, draft: Draft, batch: int, max_length: int) -> None:
        self.draft = draft
        config = draft.config
        shape = (batch, config.num_key_value_heads, max_length, config.head_dim)

        def empty() -> Tensor:
            return torch.zeros(shape, dtype=draft.dtype, device=draft.device)

        self.layers = [(empty(), empty()) for _ in range(config.num_hidden_layers)]

    def append(self, taps: Tensor, positions: Tensor) -> None:
        """Makes features context: taps [batch, w, T*H] of tokens at positions [batch, w] int64."""
        fresh = self.draft.context_keys_values(taps, positions)
        for cached, made in zip(self.layers, fresh, strict=True):
            for cache, states in zip(cached, made, strict=True):
                index = positions[:, None, :, None].expand_as(states)  # [batch, kv_heads, w, d]
                cache.scatter_(2, index, states.to(cache.dtype))

    def view(self, extent: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the first `extent` positions, for a caller who knows on the host that no row has more."""
        return [(keys[:, :, :extent], values[:, :, :extent]) for keys, values in self.layers]


def block_attention(
    anchors: Tensor, max_length: int, block_size: int, kinds: Iterable[AttentionKind]
) -> DenseBlockAttention:
    """Masks [batch, 1, B, max_length + B] of one block a row: the same visibility as in training (`blocks.masks`).

    Slot k of the block anchored at a sees context positions in [0, a), in sliding layers from a + k - (W - 1) on; of
    its own block every slot, in causal layers up to itself, in sliding layers less than W away.
    """
    position = torch.arange(max_length, device=anchors.device)  # [S]
    slot = torch.arange(block_size, device=anchors.device)
    verified = (position < anchors[:, None])[:, None, :].expand(-1, block_size, -1)  # [batch, B, S]
    away = anchors[:, None, None] + slot[:, None] - position  # [batch, B, S]
    apart = slot[:, None] - slot  # [B, B]

    def mask(kind: AttentionKind) -> Tensor:
        context, block = verified, torch.ones_like(apart, dtype=torch.bool)
        if kind.window is not None:
            context = context & (away < kind.window)
            block = block & (apart.abs() < kind.window)
        if kind.causal:
            block = block & (apart >= 0)
        return torch.cat((context, block.expand(len(anchors), -1, -1)), dim=-1).unsqueeze(1)

    return DenseBlockAttention({kind: mask(kind) for kind in set(kinds)})
