"""A transformer layer in few and large kernels, for targets and drafts alike: a value made of its weights.

Weights that read the same input are joined (queries, keys and values; gate and up). Between two matrix products runs
one kernel: residual addition and norm; norm, rope and cache write; attention; gate; and a convolution, where a sublayer
has one around it. A product of few rows comes as addends in fp32, which the next kernel sums (`skinny_linear`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from draftsmith.kernels.attention.block_attention import block_attention
from draftsmith.kernels.attention.rope_cache import HeadNorms, rope_cache
from draftsmith.kernels.attention.visibility import CachePattern
from draftsmith.kernels.layers.block_convolution import block_convolution
from draftsmith.kernels.layers.gated_activation import gated_activation
from draftsmith.kernels.layers.rms_norm import rms_norm
from draftsmith.kernels.layers.skinny_linear import linear_or_addends


class Product(NamedTuple):
    """A product's result [..., N], or where `partial` its addends [S, ..., N] in fp32."""

    value: Tensor
    partial: bool = False


class Coming(NamedTuple):
    """A sublayer's output on its way to the residual stream; `post_norm` [H] is applied before it is added, where there
    is one."""

    product: Product
    post_norm: Tensor | None = None


class Entries(NamedTuple):
    """Where a layer's tokens stand, and the cache that they attend to.

    angles: tables of cosines and sines [positions, rotary]; positions [batch] or [batch, w] int, as for `rope_cache`;
    places [batch, w] int, where in the cache the tokens' entries go, None: at their positions; cache: keys and values
    [batch, kv_heads, length, d]; pattern: who sees whom.
    """

    angles: tuple[Tensor, Tensor]
    positions: Tensor
    places: Tensor | None
    cache: tuple[Tensor, Tensor]
    pattern: CachePattern


@dataclass(frozen=True)
class Linear:
    """weight [N, K]; bias [N] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Product:
        """x W^T + b."""
        return Product(*linear_or_addends(x, self.weight, self.bias))


@dataclass(frozen=True)
class FusedNorm:
    """An RMS norm: weight [H]; unit_offset: it scales by 1 + weight (Gemma)."""

    weight: Tensor
    eps: float
    unit_offset: bool = False

    def __call__(self, coming: Coming, stream: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds what is coming to the residual stream, and norms the sum: (normed, the sum)."""
        (value, partial), post_norm = coming
        return rms_norm(
            value, self.weight, self.eps, stream, unit_offset=self.unit_offset, post_weight=post_norm, partial=partial
        )


@dataclass(frozen=True)
class FusedConvolution:
    """The convolutions around a sublayer (`block_convolution`): base [2, K, H], and the projection of their deltas."""

    base: Tensor
    projection: Linear

    def before(self, states: Tensor) -> tuple[Tensor, Product]:
        """A sublayer's input, and the deltas of both convolutions."""
        deltas = self.projection(states)
        return block_convolution(states, self.base, deltas.value, which=0, partial_deltas=deltas.partial), deltas

    def after(self, out: Product, deltas: Product) -> Product:
        """What the sublayer adds."""
        (value, partial), (of_deltas, partial_deltas) = out, deltas
        return Product(
            block_convolution(value, self.base, of_deltas, which=1, partial=partial, partial_deltas=partial_deltas)
        )


@dataclass(frozen=True)
class FusedAttention:
    """qkv: queries, keys and values, joined in this order; norms: of queries and keys, or None; out: the output
    projection; softcap and sinks as for `block_attention`."""

    qkv: Linear
    out: Linear
    heads: int
    norms: HeadNorms | None
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def __call__(self, states: Tensor, entries: Entries) -> Product:
        """States [batch, w, H], normed, over the layer's cache, into which their own entries go."""
        angles, positions, places, cache, pattern = entries
        query = rope_cache(
            self.qkv(states).value, angles, positions, cache, heads=self.heads, norms=self.norms, places=places
        )
        mixed = block_attention(query, *cache, pattern, scale=self.scale, softcap=self.softcap, sinks=self.sinks)
        return self.out(mixed.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class GatedMLP:
    """gate_up: the two joined, gate first; activation: as `gated_activation` names it."""

    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, states: Tensor) -> Product:
        """States [batch, w, H], normed."""
        gate_up, partial = self.gate_up(states)
        return self.down(gated_activation(gate_up, self.activation, states.dtype if partial else None))


@dataclass(frozen=True)
class FusedLayer:
    """A layer's weights. mlp: a gated MLP, or a function of states (a mixture of experts).

    input_norm and mlp_norm stand before the sublayers; attention_post_norm and mlp_post_norm [H] after them, where the
    family has these; so do the convolutions around them.
    """

    input_norm: FusedNorm
    attention: FusedAttention
    mlp_norm: FusedNorm
    mlp: GatedMLP | Callable[[Tensor], Tensor]
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    attention_convolution: FusedConvolution | None = None
    mlp_convolution: FusedConvolution | None = None

    def sublayers(self, states: Tensor, stream: Tensor, entries: Entries) -> tuple[Coming, Tensor]:
        """From the layer's input as `input_norm` gave it (states and stream [batch, w, H]) to what its MLP adds, and
        the residual stream that it is added to."""
        around = self.attention_convolution
        if around is None:
            out = self.attention(states, entries)
        else:
            states, deltas = around.before(states)
            out = around.after(self.attention(states, entries), deltas)
        states, stream = self.mlp_norm(Coming(out, self.attention_post_norm), stream)
        around = self.mlp_convolution
        if around is None:
            out = self._feed_forward(states)
        else:
            states, deltas = around.before(states)
            out = around.after(self._feed_forward(states), deltas)
        return Coming(out, self.mlp_post_norm), stream

    def _feed_forward(self, states: Tensor) -> Product:
        return self.mlp(states) if isinstance(self.mlp, GatedMLP) else Product(self.mlp(states))
