"""Attention to the nearest earlier tokens."""

from typing import Any, ClassVar

from draftsmith.targets.cache import KeysValuesShape
from draftsmith.targets.layers.attention import attention_shape
from draftsmith.targets.layers.kind import LayerKind


class WindowAttention(LayerKind):
    """Keeps the keys and values of all tokens, of which each query sees those within the window that the model asks
    for."""

    name: ClassVar[str] = "sliding_attention"

    def shape(self, text_config: Any, index: int) -> KeysValuesShape:
        """Heads as the configuration has them for all layers."""
        return attention_shape(text_config)
