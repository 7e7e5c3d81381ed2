"""Attention to all earlier tokens."""

from typing import Any, ClassVar

from draftsmith.targets.cache import KeysValuesShape
from draftsmith.targets.layers.kind import LayerKind


class FullAttention(LayerKind):
    """Keeps the keys and values of all tokens."""

    name: ClassVar[str] = "full_attention"

    def shape(self, text_config: Any, index: int) -> KeysValuesShape:
        """Heads as the configuration has them for all layers."""
        return attention_shape(text_config)


def attention_shape(text_config: Any) -> KeysValuesShape:
    """Keys and values of a layer with the heads of a Hugging Face text configuration: `num_key_value_heads`, or
    `num_attention_heads` without, of `head_dim`, or the hidden size divided among them."""
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    return KeysValuesShape(getattr(text_config, "num_key_value_heads", None) or heads, head_dim, head_dim)
