"""Attention to the nearest earlier tokens."""

from typing import ClassVar

from draftsmith.targets.layers.attention import FullAttention


class WindowAttention(FullAttention):
    """Keeps the keys and values of all tokens, of which each query sees those within the window that the model asks
    for."""

    name: ClassVar[str] = "sliding_attention"
