"""Attention of the target's new tokens over its cache, handed to Hugging Face models through their AttentionInterface.

The models compute queries, keys and values (projections, norms, rope) themselves and then call the attention function
that their configuration names. Ours writes the new keys and values to the cache and attends to what each query may see:
cache entries of its own row at positions up to its own, and within the layer's sliding window where it has one. Nothing
here depends on the library's own cache classes or on how it builds masks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.attention.block_attention import block_attention
from draftsmith.targets.cache import KeysValuesShape
from draftsmith.targets.passes import CachedPass

IMPLEMENTATION = "draftsmith"

# Arguments of other attention functions that change the result and that this one does not compute.
_UNSUPPORTED = ("attention_mask", "position_bias", "head_mask", "sinks", "indices", "block_indices")


class CachedAttention:
    """The attention of one pass over a cache."""

    def __init__(self, run: CachedPass) -> None:
        self.run = run

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """New tokens' query [batch, heads, w, key_dim], key [batch, kv_heads, w, key_dim] and value [batch, kv_heads,
        w, value_dim] -> [batch, heads, w, value_dim]. sinks [heads]: scores that take part in each query's softmax
        and have no value."""
        stored = self.run.keys_values(layer)
        stored.write(self.run.places, key, value)
        self.run.ran(layer)
        return block_attention(
            query, stored.keys, stored.values, self.run.pattern(window), scale=scale, softcap=softcap, sinks=sinks
        )


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    draftsmith_attention: CachedAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The signature that Hugging Face models call; returns ([batch, w, heads, d], no attention weights)."""
    options["attention_mask"] = attention_mask
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if not getattr(module, "is_causal", True):
        unsupported.append("is_causal=False")
    if unsupported:
        raise DraftsmithError(
            f"{type(module).__name__} asks for {', '.join(unsupported)}, which cached decoding does not support; "
            "this target cannot be decoded with draftsmith"
        )
    out = draftsmith_attention.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


class RecordingAttention(CachedAttention):
    """Attends to nothing, and notes what each layer that calls it would keep of a token."""

    def __init__(self) -> None:
        self.shapes: dict[int, KeysValuesShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        self.shapes[layer] = KeysValuesShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(*query.shape[:3], value.shape[3])


AttentionInterface.register(IMPLEMENTATION, _attention_function)


@contextmanager
def draftsmith_attention(config: PretrainedConfig) -> Iterator[None]:
    """While open, the model that `config` belongs to attends through this file; afterwards it is as it was."""
    before = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before
