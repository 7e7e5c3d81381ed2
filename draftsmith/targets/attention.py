"""Attention of the target's new tokens over its cache, handed to Hugging Face models through their AttentionInterface.

The models compute queries, keys and values (projections, norms, rope) themselves and then call the attention function
that their configuration names. Ours writes the new keys and values to the cache and attends to what each query may see:
cache entries of its own row at positions up to its own, and within the layer's sliding window where it has one. Nothing
here depends on the library's own cache classes or on how it builds masks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.attention.block_attention import block_attention
from draftsmith.targets.cache import KeysValuesShape
from draftsmith.targets.passes import CachedPass

IMPLEMENTATION = "draftsmith"

# Arguments of other attention functions that change the result and that this one does not compute.
_UNSUPPORTED = ("position_bias", "head_mask", "sinks", "indices", "block_indices")


class CachedAttention:
    """The attention of one pass over a cache. implementation: the name that a configuration has for it."""

    implementation: ClassVar[str] = IMPLEMENTATION

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

    def take_mask(self, layer: int, mask: Tensor | None, name: str) -> None:
        """What a layer, whose class is called `name`, asks for as its mask. Raises `DraftsmithError` for any: who is
        seen is decided here."""
        if mask is not None:
            raise _unsupported(name, ["attention_mask"])


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    draftsmith_attention: CachedAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The signature that Hugging Face models call; returns ([batch, w, heads, d], no attention weights)."""
    if draftsmith_attention is None:
        raise DraftsmithError(
            f"{type(module).__name__} is not given the arguments that its decoder is called with, so that it cannot "
            "attend over a cache; this target cannot be decoded with draftsmith"
        )
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if not getattr(module, "is_causal", True):
        unsupported.append("is_causal=False")
    if unsupported:
        raise _unsupported(type(module).__name__, unsupported)
    draftsmith_attention.take_mask(module.layer_idx, attention_mask, type(module).__name__)  # type: ignore[arg-type]
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


def _unsupported(module: str, asked: Sequence[str]) -> DraftsmithError:
    return DraftsmithError(
        f"{module} asks for {', '.join(asked)}, which cached decoding does not support; this target cannot be decoded "
        "with draftsmith"
    )


AttentionInterface.register(IMPLEMENTATION, attention_function)


@contextmanager
def draftsmith_attention(config: PretrainedConfig, implementation: str = IMPLEMENTATION) -> Iterator[None]:
    """While open, the model that `config` belongs to attends through this file; afterwards it is as it was."""
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before
