"""Fields of Hugging Face configurations, which newer models may give each layer anew."""

from collections import Counter
from typing import Any


def of_each_layer(config: Any, name: str) -> list[Any] | None:
    """The values that a configuration gives its layers one by one, None for a layer without; None where it has one
    value for all, or none."""
    if not getattr(config, "is_heterogeneous", False):
        return None
    values = [getattr(layer, name, None) for layer in config.per_layer_config]
    return values if len(set(map(repr, values))) > 1 else None


def field(config: Any, name: str) -> Any:
    """A field's value; where layers differ in it, what most of them have. None where there is none."""
    if not getattr(config, "is_heterogeneous", False):
        return getattr(config, name, None)
    values = [getattr(layer, name, None) for layer in config.per_layer_config]
    return Counter(values).most_common(1)[0][0]
