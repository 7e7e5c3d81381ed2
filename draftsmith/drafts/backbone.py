"""The network that all family members share: Qwen3-style layers whose queries are block slots only (DFlash,
2602.06036).

Keys and values come from two sources: the context features of verified tokens, and the block itself. The context's
are made by `context_keys_values`, in training for whole packed rows, in decoding for each newly verified stretch, so
both go through the same code; which of them a slot sees is decided by the `BlockAttention` callable.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftsmith.drafts.attention import AttentionInputs, AttentionKind, BlockAttention
from draftsmith.drafts.network import Network, NetworkSizes
from draftsmith.drafts.rope import Rope, rotate
from draftsmith.drafts.wrapper import SublayerWrapper

ContextKeysValues = list[tuple[Tensor, Tensor]]


WRAPPED_SUBLAYERS = ("attention_conv", "mlp_conv")
"""Names that a layer's wrapper modules go by, in the module and in files."""


def is_added(parameter: str) -> bool:
    """Whether a parameter, by its name in `Draft`, belongs to what a method adds to the network that all share: a head,
    or modules around sublayers."""
    parts = parameter.split(".")
    return parts[0] == "head" or any(part in WRAPPED_SUBLAYERS for part in parts)


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension; statistics in fp32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        # Under autocast the weight is fp32 and x is not: the output keeps x's dtype.
        return (self.weight * normed.to(x.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of block slots over [context; own block] with RMSNorm on queries and keys."""

    def __init__(self, config: NetworkSizes, kind: AttentionKind) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.kind = kind
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.attention_sink_bias = nn.Parameter(torch.empty(heads)) if config.attention_sinks else None

    def reset_parameters(self) -> None:
        if self.attention_sink_bias is not None:
            nn.init.zeros_(self.attention_sink_bias)

    def _split(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim))  # [..., tokens, heads, d]

    def keys_values(self, states: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values of `states` [R, tokens, H]: each [R, kv_heads, tokens, d].

        Context features come as they are, block slots layer-normed (DFlash, arXiv 2602.06036); cosine and sine
        [R, tokens, rotary_dim].
        """
        values = self._split(self.v_proj(states)).transpose(1, 2)
        keys = self.k_norm(self._split(self.k_proj(states))).transpose(1, 2)
        return rotate(keys, cosine[:, None], sine[:, None]).to(values.dtype), values

    def queries(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Queries (normed, rotated) of `hidden` [R, tokens, H]: [R, heads, tokens, d]."""
        queries = self.q_norm(self._split(self.q_proj(hidden))).transpose(1, 2)
        return rotate(queries, cosine[:, None], sine[:, None]).to(queries.dtype)

    def output(self, mixed: Tensor) -> Tensor:
        """What attention mixed, [R, heads, tokens, d] -> [R, tokens, H]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: NetworkSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """One pre-norm layer; a head may wrap its two sublayers (`SublayerWrapper`).

    It runs in three parts: what comes before attention, attention, and what comes after; `fused` says whether the two
    outer ones are compiled.
    """

    fused = False

    def __init__(self, config: NetworkSizes, kind: AttentionKind, wrappers: dict[str, SublayerWrapper]) -> None:
        super().__init__()
        self.self_attn = Attention(config, kind)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if strange := set(wrappers) - set(WRAPPED_SUBLAYERS):
            raise ValueError(f"wrappers {sorted(strange)}; a layer has {WRAPPED_SUBLAYERS}")
        self.attention_conv = wrappers.get("attention_conv")
        self.mlp_conv = wrappers.get("mlp_conv")

    def forward(
        self, hidden: Tensor, cosine: Tensor, sine: Tensor, context: tuple[Tensor, Tensor], attend: BlockAttention
    ) -> Tensor:
        """hidden [R, N, B, H] -> [R, N, B, H]; cosine and sine [R, N*B, rotary_dim]."""
        before, after = Layer.before_attention, Layer.after_attention
        if self.fused:
            before, after = compiled(before), compiled(after)
            _of_any_size(1, hidden, cosine, sine)
        queries, keys, values, state = before(self, hidden, cosine, sine)
        attention = self.self_attn
        mixed = attend(
            AttentionInputs(
                queries.transpose(1, 2),
                *context,
                keys.transpose(1, 2),
                values.transpose(1, 2),
                kind=attention.kind,
                scale=attention.scale,
                sinks=attention.attention_sink_bias,
            )
        )
        if self.fused:
            _of_any_size(2, mixed)
            if state is not None:
                _of_any_size(1, state)
        return after(self, mixed, hidden, state)

    def before_attention(
        self, hidden: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """hidden [R, N, B, H] -> queries [R, N*B, heads, d], keys and values [R, N*B, kv_heads, d] of the slots, and
        what the wrapper around attention keeps.

        Heads stand last but one, as the projections lay them: the backward of compiled code wants the gradients of
        its results contiguous, and would copy those of transposed ones.
        """
        inner, state = self._normed(self.input_layernorm, hidden), None
        if self.attention_conv is not None:
            inner, state = self.attention_conv.before(inner)
        inner = inner.flatten(1, 2)
        keys, values = self.self_attn.keys_values(inner, cosine, sine)
        queries = self.self_attn.queries(inner, cosine, sine)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), state

    def after_attention(self, mixed: Tensor, hidden: Tensor, state: Tensor | None) -> Tensor:
        """mixed [R, heads, N*B, d], hidden [R, N, B, H] as it came to the layer -> [R, N, B, H]."""
        out = self.self_attn.output(mixed).unflatten(1, hidden.shape[1:3])
        if self.attention_conv is not None:
            assert state is not None
            out = self.attention_conv.after(out, state)
        hidden = hidden + out
        inner = self._normed(self.post_attention_layernorm, hidden)
        if self.mlp_conv is None:
            return hidden + self.mlp(inner)
        inner, state = self.mlp_conv.before(inner)
        return hidden + self.mlp_conv.after(self.mlp(inner), state)

    def _normed(self, norm: nn.Module, hidden: Tensor) -> Tensor:
        """The norm; in compiled code the backward makes it again, which costs less than keeping it is worth."""
        again = self.fused and torch.is_grad_enabled()
        normed: Tensor = checkpoint(norm, hidden, use_reentrant=False) if again else norm(hidden)
        return normed


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under torch.compile. As a function of the module, so that all layers share the code; sizes that
    change from batch to batch are told by `_of_any_size`, others are compiled as they come first, then once more."""
    from torch._inductor import config  # slow to import, and needed by compiled runs only

    # The backward of a norm is two reductions, over channels and over slots. Inductor joins them from some number of
    # slots on, and would compile everything again on the other side of it; in this mode it always does.
    always_joined = "mix_order_reduction_non_strict_mode"
    options: dict[str, Any] = {f"triton.{always_joined}": True} if hasattr(config.triton, always_joined) else {}
    return torch.compile(function, fullgraph=True, options=options)


def _of_any_size(dim: int, *tensors: Tensor) -> None:
    """Tell the compiler that this dimension, over blocks or slots, changes from batch to batch: code for any size is
    then the first to be made, not the second."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


class Backbone(Network):
    """Fuses tapped features into context, and runs blocks of embeddings over it.

    wrappers: makes those of a layer's sublayers, by their names in `WRAPPED_SUBLAYERS`.
    """

    read_first = ("k_proj", "v_proj", "k_norm")  # they make the context

    def __init__(self, config: NetworkSizes, wrappers: Callable[[], dict[str, SublayerWrapper]]) -> None:
        super().__init__()
        self.attention_kinds = config.attention_kinds
        self.layers = nn.ModuleList(Layer(config, kind, wrappers()) for kind in self.attention_kinds)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = Rope(config)
        self.fused = False
        self.recompute = False
        """Whether layers keep no activations for the backward, which then computes them again (gradient
        checkpointing)."""

    def context_keys_values(self, features: Tensor, positions: Tensor) -> ContextKeysValues:
        """Per layer, keys and values of the context: features [R, S, T*H], positions [R, S] -> each [R, kv_heads, S,
        d]."""
        run = Backbone._context_keys_values
        found = (compiled(run) if self.fused else run)(self, features, positions)
        return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in found]

    def _context_keys_values(self, features: Tensor, positions: Tensor) -> ContextKeysValues:
        """As `context_keys_values`, but [R, S, kv_heads, d]: see `Layer.before_attention`."""
        context = self.hidden_norm(self.fc(features))
        cosine, sine = self.rope(positions)
        pairs = [cast(Layer, layer).self_attn.keys_values(context, cosine, sine) for layer in self.layers]
        return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in pairs]

    def fuse(self) -> None:
        """Run compiled code for everything but attention from now on."""
        self.fused = True
        for layer in self.layers:
            cast(Layer, layer).fused = True

    def forward(
        self, embeddings: Tensor, positions: Tensor, context: ContextKeysValues, attend: BlockAttention
    ) -> Tensor:
        """embeddings [R, N, B, H], positions [R, N, B] -> final normed hidden states [R, N, B, H]."""
        cosine, sine = self.rope(positions.flatten(1))
        hidden = embeddings
        for layer, layer_context in zip(self.layers, context, strict=True):
            if self.recompute and torch.is_grad_enabled():
                # With the weights of now: where others stand in for the parameters, they may be gone by the backward.
                weights, inputs = dict(layer.named_parameters()), (hidden, cosine, sine, layer_context, attend)
                # Layers draw no random numbers, so none need be drawn again alike.
                hidden = checkpoint(
                    functional_call, layer, weights, inputs, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = layer(hidden, cosine, sine, layer_context, attend)
        if self.fused:
            _of_any_size(1, hidden)
        normed: Tensor = compiled(RMSNorm.forward)(self.norm, hidden) if self.fused else self.norm(hidden)
        return normed
