"""The target's cached forward with fewer, fatter operations: joined projections and fused kernels around them.

The layers (`kernels.fused_layer`) are computed as the model's own code computes them, rounding where it rounds; only
which operations share a launch differs. The model itself is not changed but for its weights' storage
(`targets.joining`), and its own code stays the reference: `fuse` compares the two on a few tokens before anything else
is run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.fused_layer import Coming, Entries, FusedLayer, FusedNorm, Product
from draftsmith.targets.attention import CachedAttention, draftsmith_attention
from draftsmith.targets.cache import TargetCache
from draftsmith.targets.experts import capturable_experts
from draftsmith.targets.joining import STYLES, LayerFacts, fusing_fault, join_layer, norm_epsilon
from draftsmith.targets.passes import CachedPass
from draftsmith.targets.taps import tap_layers

# Positions of the angle tables past the model's own last one: room for a block that begins within it.
_TABLE_MARGIN = 256


class FusedDecoder:
    """Runs the layers of a model whose weights it has joined; holds no state of any batch.

    layers: the model's; windows: of each layer's attention, None: none; tables: (cos, sin) [positions, rotary] of each
    layer, in the model's dtype.
    """

    def __init__(
        self,
        layers: Sequence[FusedLayer],
        windows: Sequence[int | None],
        tables: Sequence[tuple[Tensor, Tensor]],
        final_norm: FusedNorm,
    ) -> None:
        self.layers = tuple(layers)
        self.windows = tuple(windows)
        self.tables = tuple(tables)
        self.final_norm = final_norm

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
        taps: dict[int, Tensor] = {}
        stream: Tensor | None = None
        coming = Coming(Product(embedded))
        for index, layer in enumerate(self.layers):
            states, stream = layer.input_norm(coming, stream)
            if index - 1 in tap_ids:
                taps[index - 1] = stream
            coming, stream = layer.sublayers(states, stream, self._entries(index, run))
        final, stream = self.final_norm(coming, stream)
        if len(self.layers) - 1 in tap_ids:
            taps[len(self.layers) - 1] = stream
        return final, taps

    def one_layer(self, index: int, inputs: Tensor, run: CachedPass) -> tuple[Tensor, Tensor]:
        """A layer's outputs [B, w, H] from its inputs, and the same after the model's final norm."""
        layer = self.layers[index]
        states, stream = layer.input_norm(Coming(Product(inputs)), None)
        coming, stream = layer.sublayers(states, stream, self._entries(index, run))
        normed, outputs = self.final_norm(coming, stream)
        return outputs, normed

    def _entries(self, index: int, run: CachedPass) -> Entries:
        stored = run.keys_values(index)
        places = None if run.at_positions else run.places
        pattern = run.pattern(self.windows[index])
        return Entries(self.tables[index], run.positions, places, (stored.keys, stored.values), pattern)


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
    facts = [recorder.facts[index] for index in every_layer]
    fused = FusedDecoder(
        [join_layer(layer, style, config, asked, epsilon) for layer, asked in zip(decoder.layers, facts, strict=True)],
        [asked.window for asked in facts],
        ropes,
        FusedNorm(decoder.norm.weight.detach(), epsilon, style.unit_offset),
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
