"""The draft's context during decoding: keys and values of verified tokens, and who sees them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.drafts.attention import AttentionKind, DenseBlockAttention
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.fused import FusedDraft


@dataclass(frozen=True)
class ContextCache:
    """Static keys and values of every draft layer: storage [layers, 2, slots, kv_heads, max_length, d].

    An entry is placed by its position, and counts for a block when its position is below the block's anchor. What a
    rejected proposal left behind lies at or past the next anchor, and is overwritten before the anchor passes it.
    rope_table: what `FusedDraft` reads of each position, where it is used.
    """

    storage: Tensor
    rope_table: Tensor | None

    def rows(self, begin: int, end: int) -> "ContextCache":
        """The same storage, seen for these slots only."""
        return ContextCache(self.storage[:, :, begin:end], self.rope_table)

    def view(self, extent: int) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of the first `extent` positions."""
        return [(layer[0, :, :, :extent], layer[1, :, :, :extent]) for layer in self.storage]


class BlockRunner(Protocol):
    """The draft's part of a step."""

    def new_cache(self, slots: int, max_length: int) -> ContextCache:
        """Zeroed storage. Zeros and not empty memory: a masked entry has weight 0, but 0 * NaN would still be NaN."""
        ...

    def append(self, taps: Tensor, start: Tensor, cache: ContextCache) -> None:
        """Makes features context: taps [batch, w, T*H] of the tokens at start + 0 .. w - 1, start [batch] int64."""
        ...

    def block(self, embeddings: Tensor, anchors: Tensor, cache: ContextCache, extent: int) -> Tensor:
        """One block a row: embeddings [batch, B, H], anchors [batch] -> final states [batch, B, H]. No row's anchor
        + B exceeds `extent`."""
        ...


class DenseBlocks:
    """The draft's own modules, under explicit masks: on a CPU, and the reference of the fused way."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def new_cache(self, slots: int, max_length: int) -> ContextCache:
        return ContextCache(_storage(self.draft, slots, max_length), None)

    def append(self, taps: Tensor, start: Tensor, cache: ContextCache) -> None:
        positions = start[:, None] + torch.arange(taps.shape[1], device=start.device)
        fresh = self.draft.context_keys_values(taps, positions)
        for cached, made in zip(cache.storage, fresh, strict=True):
            for stored, states in zip(cached, made, strict=True):
                index = positions[:, None, :, None].expand_as(states)  # [batch, kv_heads, w, d]
                stored.scatter_(2, index, states.to(stored.dtype))

    def block(self, embeddings: Tensor, anchors: Tensor, cache: ContextCache, extent: int) -> Tensor:
        width = embeddings.shape[1]
        positions = anchors[:, None] + torch.arange(width, device=anchors.device)
        attention = block_masks(anchors, extent, width, self.draft.attention_kinds)
        return self.draft(embeddings[:, None], positions[:, None], cache.view(extent), attention)[:, 0]


class FusedBlocks:
    """`FusedDraft` on a cache of this file."""

    def __init__(self, draft: Draft) -> None:
        self.fused = FusedDraft(draft)

    def new_cache(self, slots: int, max_length: int) -> ContextCache:
        return ContextCache(_storage(self.fused.draft, slots, max_length), self.fused.rope_table(max_length))

    def append(self, taps: Tensor, start: Tensor, cache: ContextCache) -> None:
        assert cache.rope_table is not None
        self.fused.append(taps, start, cache.storage, cache.rope_table)

    def block(self, embeddings: Tensor, anchors: Tensor, cache: ContextCache, extent: int) -> Tensor:
        assert cache.rope_table is not None
        return self.fused.block(embeddings, anchors, cache.storage, cache.rope_table)


def _storage(draft: Draft, slots: int, max_length: int) -> Tensor:
    config = draft.config
    shape = (config.num_hidden_layers, 2, slots, config.num_key_value_heads, max_length, config.head_dim)
    return torch.zeros(shape, dtype=draft.dtype, device=draft.device)


def block_masks(
    anchors: Tensor, max_length: int, block_size: int, kinds: Iterable[AttentionKind]
) -> DenseBlockAttention:
    """Masks [batch, 1, B, max_length + B] of one block a row: the same visibility as in training (`blocks.sight`).

    Of the verified context, positions below the anchor, and of its own block, each slot sees what `AttentionKind.sees`
    says.
    """
    slot = torch.arange(block_size, device=anchors.device)
    context = torch.arange(max_length, device=anchors.device)
    blocks = anchors[:, None] + slot  # [batch, B] positions
    verified = context < anchors[:, None]  # [batch, S]
    there = torch.cat((verified, torch.ones_like(blocks, dtype=torch.bool)), dim=1)
    keys = torch.cat((context.expand(len(anchors), -1), blocks), dim=1)
    away = blocks[:, :, None] - keys[:, None]  # [batch, B, S + B]
    return DenseBlockAttention({kind: (there[:, None] & kind.sees(away)).unsqueeze(1) for kind in set(kinds)})
