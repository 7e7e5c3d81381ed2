"""Attention to all earlier tokens."""

from typing import Any, ClassVar

from draftsmith.targets.cache import KeysValuesShape
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.layers.kind import LayerKind


class FullAttention(LayerKind):
    """Keeps the keys and values of all tokens."""

    name: ClassVar[str] = "full_attention"

    def shape(self, text_config: Any, index: int) -> KeysValuesShape:
        """Heads as the configuration has them for all layers."""
        return attention_shape(text_config)


def attention_shape(text_config: Any) -> KeysValuesShape:
    """Keys and values of a layer with the heads of a Hugging Face text configuration."""
    info = TargetInfo(text_config)
    return KeysValuesShape(info.kv_heads, info.head_dim, info.head_dim)
