"""The two ways to count a target's layers: by what a layer wrote, and by what a layer reads.

Tap ids count the first way (`targets.taps` says which tensor that is): tap `i` is what layer `i` wrote, which layer
`i + 1` reads. SGLang's "before layer" hooks and the `aux_hidden_state_layer_ids` of speculators and vLLM count the
second way, in which 0 is the embedding and the number of layers is what the last layer wrote.
"""

from collections.abc import Sequence


def to_layer_input_ids(tap_ids: Sequence[int]) -> list[int]:
    """Tap ids, counted by what a layer reads."""
    return [tap_id + 1 for tap_id in tap_ids]


def from_layer_input_ids(layer_ids: Sequence[int]) -> list[int]:
    """The inverse of `to_layer_input_ids`; no tap stands for id 0, so the ids must be at least 1."""
    return [layer_id - 1 for layer_id in layer_ids]
