"""Attention to all earlier tokens."""

from typing import Any, ClassVar

from draftsmith.errors import DraftsmithError
from draftsmith.targets.cache import KeysValuesShape
from draftsmith.targets.layers.kind import LayerKind


class FullAttention(LayerKind):
    """Keeps the keys and values of all tokens."""

    name: ClassVar[str] = "full_attention"

    def shape(self, text_config: Any, index: int, attention: KeysValuesShape | None) -> KeysValuesShape:
        """Keys and values as the layer hands them over, which may differ from layer to layer."""
        if attention is None:
            raise DraftsmithError(
                f"layer {index} of this {text_config.model_type} model calls no attention function, so draftsmith "
                "cannot keep its keys and values; this model type cannot be decoded"
            )
        return attention
