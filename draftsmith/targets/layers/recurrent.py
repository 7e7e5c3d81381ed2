"""Layers that keep a state in place of keys: its storage, and one pass of it.

The layer's own modules project, gate and norm. The short convolution and the recurrence between them run here, over
what the cache keeps. The next pass adds the tentative tokens that stand to the states (`kernels.recurrent.kept`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.recurrent.kept import Standing
from draftsmith.kernels.recurrent.recurrence import KeptTokens, Tokens, recurrence
from draftsmith.kernels.recurrent.short_convolution import short_convolution
from draftsmith.targets.cache import LayerCache, Room
from draftsmith.targets.passes import CachedPass


class ShortWindow(LayerCache):
    """The last inputs of a short convolution: window [slots, 2, K - 1, C] and kept [slots, 2, width, C], in the model's
    dtype (`kernels.recurrent.short_convolution`)."""

    standing: Standing

    def __init__(self, window: Tensor, kept: Tensor, standing: Standing) -> None:
        self.window = window
        self.kept = kept
        self.standing = standing

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.window, self.kept

    def rows(self, begin: int, end: int) -> "ShortWindow":
        return ShortWindow(self.window[begin:end], self.kept[begin:end], self.standing.rows(begin, end))

    def view(self, extent: int) -> "ShortWindow":
        return self  # a state has no positions

    def keep(self, count: Tensor, path: Tensor | None) -> None:
        """Which tokens stand is noted once for all layers (`StaticCache.keep`)."""

    def convolve(self, x: Tensor, run: CachedPass, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
        """x [slots, w, C], weight [C, K], bias [C] or None -> [slots, w, C]."""
        return short_convolution(
            x, self.window, self.kept, self.standing, run.recurrent, weight.contiguous(), bias, silu=silu
        )


@dataclass(frozen=True)
class ShortWindowShape:
    """channels: C; taps: K."""

    channels: int
    taps: int

    def allocate(self, room: Room) -> ShortWindow:
        window, kept = (
            torch.zeros(room.slots, 2, length, self.channels, dtype=room.dtype, device=room.device)
            for length in (self.taps - 1, room.width)
        )
        return ShortWindow(window, kept, room.standing)


class RecurrentState(LayerCache):
    """A state [slots, heads, key_dim, value_dim] float32, its tentative tokens, and the window of the convolution that
    makes queries, keys and values. shape: its sizes."""

    standing: Standing

    def __init__(self, shape: "RecurrentShape", state: Tensor, kept: KeptTokens, window: ShortWindow) -> None:
        self.shape = shape
        self.state = state
        self.kept = kept
        self.window = window
        self.standing = window.standing

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.state, *self.kept.tensors, *self.window.tensors

    def rows(self, begin: int, end: int) -> "RecurrentState":
        kept, window = self.kept.rows(begin, end), self.window.rows(begin, end)
        return RecurrentState(self.shape, self.state[begin:end], kept, window)

    def view(self, extent: int) -> "RecurrentState":
        return self  # a state has no positions

    def keep(self, count: Tensor, path: Tensor | None) -> None:
        """Which tokens stand is noted once for all layers (`StaticCache.keep`)."""

    def advance(self, tokens: Tokens, run: CachedPass, *, scale: float, normalise: bool) -> Tensor:
        """Outputs [slots, w, heads, value_dim] of the pass's tokens (`kernels.recurrent.recurrence`)."""
        return recurrence(self.state, tokens, self.kept, self.standing, run.recurrent, scale=scale, normalise=normalise)


@dataclass(frozen=True)
class RecurrentShape:
    """Sizes of a recurrent layer. by_channel: a decay for every key channel, and not for every head; delta: it follows
    the delta rule, whose rates are kept as well; taps: K of the convolution over queries, keys and values."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_channel: bool
    delta: bool

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def allocate(self, room: Room) -> RecurrentState:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(room.slots, *shape, dtype=dtype, device=room.device)

        kept = KeptTokens(
            zeros(2, room.width, self.key_heads, self.key_dim, dtype=room.dtype),
            zeros(2, room.width, self.heads, self.value_dim, dtype=room.dtype),
            zeros(2, room.width, self.heads, *((self.key_dim,) if self.by_channel else ())),
            zeros(2, room.width, self.heads) if self.delta else None,
        )
        window = ShortWindowShape(self.channels, self.taps).allocate(room)
        return RecurrentState(self, zeros(self.heads, self.key_dim, self.value_dim), kept, window)

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [..., key_heads, key_dim] and values [..., heads, value_dim] of mixed [..., channels]."""
        keys = self.key_heads * self.key_dim
        query, key, value = mixed.split((keys, keys, self.heads * self.value_dim), dim=-1)
        return (
            query.unflatten(-1, (self.key_heads, self.key_dim)),
            key.unflatten(-1, (self.key_heads, self.key_dim)),
            value.unflatten(-1, (self.heads, self.value_dim)),
        )


def kept_state(run: CachedPass, index: int, model: str) -> RecurrentState:
    """What layer `index` keeps. Raises `DraftsmithError` for a pass over a tree: a state follows one path."""
    kept = run.cache.layers[index]
    assert isinstance(kept, RecurrentState)
    if run.ancestors is not None:
        raise DraftsmithError(
            f"layer {index} of {model} keeps a recurrent state, which follows one path of tokens and no tree; "
            "propose a chain"
        )
    return kept
