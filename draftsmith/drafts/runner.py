"""Runs a draft's blocks in decoding, over the context that verified tokens left: their keys and values, and who sees
them."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.drafts.attention import AttentionKind, DenseBlockAttention
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.fused import FusedDraft
from draftsmith.kernels.attention.visibility import Visibility
from draftsmith.targets.cache import KeysValues, KeysValuesShape, Room, StaticCache

_log = logging.getLogger(__name__)

_FUSED_BLOCK_SIZE = 32
"""Widest block that the fused pass is tested with."""


@dataclass(frozen=True)
class ContextCache:
    """A draft's context: a static cache of its layers, whose entries lie at their positions.

    An entry counts for a block when its position is below the block's anchor. What a rejected proposal left behind lies
    at or past the next anchor, and is overwritten before the anchor passes it. rope_table: what `FusedDraft` reads of
    each position, where it is used.
    """

    cache: StaticCache
    rope_table: Tensor | None

    @property
    def joint(self) -> Tensor:
        """All of it: [layers, 2, slots, kv_heads, length, d]."""
        assert self.cache.joint is not None  # a draft's layers are of one shape
        return self.cache.joint

    def rows(self, begin: int, end: int) -> "ContextCache":
        """The same storage, seen for these slots only."""
        return ContextCache(self.cache.rows(begin, end), self.rope_table)

    def erase(self, slots: Sequence[int]) -> None:
        """As `StaticCache.erase`."""
        self.cache.erase(slots)

    def view(self, extent: int) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of the first `extent` positions."""
        layers = [layer.tensors for layer in self.cache.view(extent).layers]
        return [(keys, values) for keys, values in layers]


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
        return ContextCache(_cache(self.draft, slots, max_length), None)

    def append(self, taps: Tensor, start: Tensor, cache: ContextCache) -> None:
        positions = start[:, None] + torch.arange(taps.shape[1], device=start.device)
        fresh = self.draft.context_keys_values(taps, positions)
        for layer, (keys, values) in zip(cache.cache.layers, fresh, strict=True):
            assert isinstance(layer, KeysValues)
            layer.write(positions, keys.to(layer.keys.dtype), values.to(layer.values.dtype))

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
        return ContextCache(_cache(self.fused.draft, slots, max_length), self.fused.rope_table(max_length))

    def append(self, taps: Tensor, start: Tensor, cache: ContextCache) -> None:
        assert cache.rope_table is not None
        self.fused.append(taps, start, cache.joint, cache.rope_table)

    def block(self, embeddings: Tensor, anchors: Tensor, cache: ContextCache, extent: int) -> Tensor:
        assert cache.rope_table is not None
        return self.fused.block(embeddings, anchors, cache.joint, cache.rope_table)


def block_runner(draft: Draft) -> BlockRunner:
    """What runs the draft's blocks: the fused pass on a CUDA device, if it takes blocks so wide, else the draft's own
    modules. Where those run on a CUDA device the log says so, once a call."""
    if draft.device.type != "cuda":
        return DenseBlocks(draft)
    block_size = draft.config.block_for("decoding").size
    if block_size > _FUSED_BLOCK_SIZE:
        _log.warning(
            "the draft's blocks have %d slots and the fused pass takes up to %d: the draft's own modules run, which is "
            "slower; decode with a smaller block (tune finds one), or train one",
            block_size,
            _FUSED_BLOCK_SIZE,
        )
        return DenseBlocks(draft)
    return FusedBlocks(draft)


def _cache(draft: Draft, slots: int, length: int) -> StaticCache:
    config = draft.config
    shape = KeysValuesShape(config.num_key_value_heads, config.head_dim, config.head_dim)
    return StaticCache.allocate([shape] * config.num_hidden_layers, Room(slots, length, 1, draft.dtype, draft.device))


def block_masks(
    anchors: Tensor, max_length: int, block_size: int, kinds: Iterable[AttentionKind]
) -> DenseBlockAttention:
    """Masks [batch, 1, B, max_length + B] of one block a row: by the rule of training
    (`kernels.attention.visibility`)."""
    visible = partial(
        Visibility.of,
        begin=torch.zeros_like(anchors[:, None]),
        end=anchors[:, None],
        anchor=anchors[:, None],
        depth=torch.arange(block_size, device=anchors.device),
        own=torch.full_like(anchors[:, None], max_length),
        size=block_size,
        num_keys=max_length + block_size,
    )
    return DenseBlockAttention({k: visible(causal=k.causal, window=k.window).mask() for k in set(kinds)})
