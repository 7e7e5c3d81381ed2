"""Attention of the target's new tokens over its cache, handed to Hugging Face models through their AttentionInterface.

The models compute queries, keys and values (projections, norms, rope) themselves and then call the attention function
that their configuration names. Ours writes the new keys and values to the cache and attends to what each query may see:
cache entries of its own row at positions up to its own, and within the layer's sliding window where it has one. Nothing
here depends on the library's own cache classes or on how it builds masks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig

from draftsmith.errors import DraftsmithError
from draftsmith.targets.cache import KeysValues, KeysValuesShape
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
        stored = self.keys_values(layer)
        stored.write(self.run.places, key, value)
        self.run.ran(layer)
        return self.over_cache(query, stored, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def keys_values(self, layer: int) -> KeysValues:
        """What an attention layer keeps. Raises `DraftsmithError` for a layer of another kind."""
        kept = self.run.cache.layers[layer]
        if not isinstance(kept, KeysValues):
            raise DraftsmithError(
                f"layer {layer} attends to earlier tokens, but the cache keeps a {type(kept).__name__} for it: the "
                "configuration gives this layer another kind than the model"
            )
        return kept

    def over_cache(
        self,
        query: Tensor,
        stored: KeysValues,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of query [batch, heads, w, key_dim] over all that a layer keeps, its own keys and values among it.

        On a CUDA device by `kernels.attention.block_attention`, which reads only what is visible; elsewhere, and for
        sinks or values of another width than keys, by PyTorch's operations under a mask.
        """
        keys, values = stored.keys, stored.values
        if query.is_cuda and sinks is None and keys.shape[-1] == values.shape[-1]:
            from draftsmith.kernels.attention.block_attention import (
                block_attention,  # needs Triton, which a CPU may lack
            )

            return block_attention(
                query, keys, values, self.run.queries, scale=scale, causal=True, window=window, softcap=softcap,
                ancestors=self.run.ancestors,
            )  # fmt: skip
        batch, heads, width, head_dim = query.shape
        kv_heads = keys.shape[1]
        groups = heads // kv_heads
        # Query heads that share a key head become more queries of that head, so that no key is read or copied twice.
        query = query.reshape(batch, kv_heads, groups * width, head_dim)
        visible = self.run.visible(window, groups)
        if softcap is None and sinks is None:
            out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale)
        else:
            if sinks is not None:
                sinks = sinks.view(kv_heads, groups, 1, 1).expand(-1, -1, width, -1).flatten(1, 2)
            out = _explicit_attention(query, keys, values, visible, scale, softcap, sinks)
        return out.reshape(batch, heads, width, values.shape[-1])


def _explicit_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(s) v over the visible entries, in fp32, where s = scale * q.k, or softcap * tanh(scale * q.k / softcap).

    sinks [kv_heads, queries, 1]: each query's score of an entry without a value (attention sinks, arXiv 2309.17453, as
    learnt by gpt-oss).
    """
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float().masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(len(scores), -1, -1, -1)), dim=-1)
    weights = functional.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values


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
