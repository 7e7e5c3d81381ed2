"""The target's cached forward with fewer, fatter operations: joined projections and fused kernels around them.

The layers are computed as the model's own code computes them, rounding where it rounds; only which operations share a
launch differs. Between two matrix products runs one kernel: residual addition and norm; norm, rope and cache write;
attention; gate. The model itself is not changed but for its weights' storage (`targets.joining`), and its own code
stays the reference: `fuse` compares the two on a few tokens before anything else is run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.attention.rope_cache import rope_cache
from draftsmith.kernels.layers.gated_activation import gated_activation
from draftsmith.kernels.layers.rms_norm import rms_norm
from draftsmith.kernels.layers.skinny_linear import linear_or_addends
from draftsmith.targets.attention import CachedAttention, draftsmith_attention
from draftsmith.targets.cache import TargetCache
from draftsmith.targets.experts import capturable_experts
from draftsmith.targets.joining import STYLES, GatedMLP, Layer, Linear, fusing_fault, join_layer, norm_epsilon
from draftsmith.targets.passes import CachedPass
from draftsmith.targets.taps import tap_layers

# Positions of the angle tables past the model's own last one: room for a block that begins within it.
_TABLE_MARGIN = 256


@dataclass(frozen=True)
class LayerFacts:
    """What a layer tells the attention function: scale of the scores, window or None, cap of the scores or None, and
    sinks [heads] or None."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class _Sum:
    """A sublayer's output on its way to the residual stream: value [B, w, H], or [S, B, w, H] fp32 addends where
    `partial`; `post_norm` [H] is applied before it is added, where there is one."""

    value: Tensor
    partial: bool = False
    post_norm: Tensor | None = None


class FusedDecoder:
    """Runs the layers of a model whose weights it has joined; holds no state of any batch.

    layers, facts: one of each a layer; tables: (cos, sin) [positions, rotary] of each layer, in the model's dtype.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        facts: Sequence[LayerFacts],
        tables: Sequence[tuple[Tensor, Tensor]],
        final_norm: Tensor,
        *,
        epsilon: float,
        unit_offset: bool,
    ) -> None:
        self.layers = tuple(layers)
        self.facts = tuple(facts)
        self.tables = tuple(tables)
        self.final_norm = final_norm
        self.epsilon = epsilon
        self.unit_offset = unit_offset

    @property
    def max_positions(self) -> int:
        """Positions that the angle tables cover."""
        return len(self.tables[0][0])

    def forward(self, embedded: Tensor, run: CachedPass, tap_ids: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """A pass's embedded tokens [B, w, H] -> the state after the final norm [B, w, H], and the outputs of the tapped
        layers [B, w, H] by tap id.

        Raises `DraftsmithError` for a cache with more positions than the angle tables have, or of another shape.
        """
        if run.cache.length > self.max_positions:
            raise DraftsmithError(
                f"a cache of {run.cache.length} positions; the target's rope is known for {self.max_positions}"
            )
        attention = CachedAttention(run)
        taps: dict[int, Tensor] = {}
        stream: Tensor | None = None
        coming = _Sum(embedded)
        for index, layer in enumerate(self.layers):
            states, stream = self._norm(coming, stream, layer.input_norm)
            if index - 1 in tap_ids:
                taps[index - 1] = stream
            coming, stream = self._sublayers(index, states, stream, attention)
        final, stream = self._norm(coming, stream, self.final_norm)
        if len(self.layers) - 1 in tap_ids:
            taps[len(self.layers) - 1] = stream
        return final, taps

    def one_layer(self, index: int, inputs: Tensor, run: CachedPass) -> tuple[Tensor, Tensor]:
        """A layer's outputs [B, w, H] from its inputs, and the same after the model's final norm."""
        states, stream = self._norm(_Sum(inputs), None, self.layers[index].input_norm)
        coming, stream = self._sublayers(index, states, stream, CachedAttention(run))
        normed, outputs = self._norm(coming, stream, self.final_norm)
        return outputs, normed

    def _sublayers(self, index: int, states: Tensor, stream: Tensor, attention: CachedAttention) -> tuple[_Sum, Tensor]:
        """From a layer's normed input to what its MLP adds, and the residual stream that it is added to."""
        coming = self._attend(index, states, attention)
        states, stream = self._norm(coming, stream, self.layers[index].mlp_norm)
        return self._feed_forward(self.layers[index], states), stream

    def _norm(self, coming: _Sum, stream: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Adds what is coming to the residual stream, and norms the sum."""
        return rms_norm(
            coming.value, weight, self.epsilon, stream,
            unit_offset=self.unit_offset, post_weight=coming.post_norm, partial=coming.partial,
        )  # fmt: skip

    def _attend(self, index: int, states: Tensor, attention: CachedAttention) -> _Sum:
        layer, facts, run = self.layers[index], self.facts[index], attention.run
        stored = attention.keys_values(index)
        qkv, _ = self._product(states, layer.attention.qkv)
        query = rope_cache(
            qkv, *self.tables[index], run.positions, stored.keys, stored.values,
            heads=layer.attention.heads, q_weight=layer.attention.q_norm, k_weight=layer.attention.k_norm,
            eps=self.epsilon, unit_offset=self.unit_offset, places=None if run.at_positions else run.places,
        )  # fmt: skip
        attended = attention.over_cache(
            query, stored, scale=facts.scale, window=facts.window, softcap=facts.softcap, sinks=facts.sinks
        )
        value, partial = self._product(attended.transpose(1, 2).flatten(2), layer.attention.out)
        return _Sum(value, partial, layer.attention_post_norm)

    def _feed_forward(self, layer: Layer, states: Tensor) -> _Sum:
        if not isinstance(layer.mlp, GatedMLP):
            return _Sum(layer.mlp(states), False, layer.mlp_post_norm)
        gate_up, partial = self._product(states, layer.mlp.gate_up)
        gated = gated_activation(gate_up, layer.mlp.activation, states.dtype if partial else None)
        value, partial = self._product(gated, layer.mlp.down)
        return _Sum(value, partial, layer.mlp_post_norm)

    def _product(self, x: Tensor, linear: Linear) -> tuple[Tensor, bool]:
        """x W^T + b, and whether it comes as addends that the next kernel sums."""
        return linear_or_addends(x, linear.weight, linear.bias)


def fuse(
    decoder: Any, config: Any, embed: Callable[[Tensor], Tensor], new_cache: Callable[[], TargetCache]
) -> FusedDecoder:
    """A `FusedDecoder` for a Hugging Face decoder, whose weights are joined in place.

    config: its text configuration; embed: token ids to what the first layer reads; new_cache: makes an empty cache for
    one row of a few tokens, for the comparison of both ways. Raises `DraftsmithError` for a model that cannot be fused,
    by name, and for one whose fused results are not its own; the model's own code computes what it did in either case.
    """
    fault = fusing_fault(decoder, config)
    if fault is not None:
        raise DraftsmithError(
            f"this target ({type(decoder).__name__}) cannot be fused: {fault}. Set target.fuse to 'auto' or 'off': its "
            "own code then runs"
        )
    style = STYLES[type(decoder.layers[0]).__name__]
    ropes = _layer_ropes(decoder, config, style.rope_by_layer_type)
    epsilon = norm_epsilon(decoder)
    cache = new_cache()
    ids = torch.arange(1, 1 + cache.length, device=decoder.norm.weight.device)[None] % config.vocab_size
    positions = torch.arange(cache.length, device=ids.device)[None]
    run = CachedPass(cache, positions)
    recorder = _Recorder(run)
    experts = capturable_experts(decoder.config, ids.device, decoder.norm.weight.dtype)
    every_layer = range(len(decoder.layers))
    with (
        torch.no_grad(),
        draftsmith_attention(decoder.config),
        experts,
        tap_layers(decoder.layers, every_layer, stop_after_last=False) as outputs,
    ):
        final = decoder(
            input_ids=ids, position_ids=positions, use_cache=False, draftsmith_attention=recorder
        ).last_hidden_state
    fused = FusedDecoder(
        [join_layer(layer, style, config) for layer in decoder.layers],
        [recorder.facts[index] for index in every_layer],
        ropes,
        decoder.norm.weight.detach(),
        epsilon=epsilon,
        unit_offset=style.unit_offset,
    )
    inputs = embed(ids)
    with torch.no_grad(), capturable_experts(decoder.config, ids.device, final.dtype):
        for index in every_layer:
            found, normed = fused.one_layer(index, inputs, run)
            _compare(f"layer {index} of {type(decoder).__name__}", found, outputs[index], inputs)
            inputs = outputs[index]
    _compare(f"the final norm of {type(decoder).__name__}", normed, final, torch.zeros_like(final))
    return fused


class _Recorder(CachedAttention):
    """Attends as its base does, and notes what each layer asked for."""

    def __init__(self, run: CachedPass) -> None:
        super().__init__(run)
        self.facts: dict[int, LayerFacts] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.facts[layer] = LayerFacts(**options)
        return super().attend(layer, query, key, value, **options)


def _layer_ropes(decoder: Any, config: Any, by_layer_type: bool) -> list[tuple[Tensor, Tensor]]:
    """(cos, sin) [positions, rotary] of every layer, from the model's own rotary module."""
    weight = decoder.norm.weight
    positions = torch.arange(config.max_position_embeddings + _TABLE_MARGIN, device=weight.device)[None]
    sample = weight.new_empty(1, 1, 1)
    made: dict[str | None, tuple[Tensor, Tensor]] = {}
    ropes = []
    for index in range(len(decoder.layers)):
        kind = config.layer_types[index] if by_layer_type else None
        if kind not in made:
            with torch.no_grad():
                cos, sin = decoder.rotary_emb(sample, positions, *([] if kind is None else [kind]))
            made[kind] = (cos[0].contiguous(), sin[0].contiguous())
        ropes.append(made[kind])
    return ropes


def _compare(name: str, found: Tensor, expected: Tensor, inputs: Tensor) -> None:
    """Raise `DraftsmithError` unless both ways add the same to each token's inputs, up to rounding.

    Layer by layer, from the same inputs: over a whole deep model in bf16, the roundings of either way alone can move
    states by a third. A layer rounds its residual stream twice, which is allowed for beside the relative tolerance.
    """
    relative = 1e-4 if expected.dtype == torch.float32 else 6e-2
    rounding = 2 * torch.finfo(expected.dtype).eps
    difference = (found.float() - expected.float()).norm(dim=-1)
    added = (expected.float() - inputs.float()).norm(dim=-1)
    allowed = relative * added + rounding * expected.float().norm(dim=-1)
    if not bool((difference <= allowed).all()):
        raise DraftsmithError(
            f"{name} gives other states fused than by its own code (differences {difference.flatten().tolist()} of "
            f"what it adds, {added.flatten().tolist()}). Set target.fuse to 'off' (its own code then runs), and report "
            "this model, so that it can be fused"
        )
