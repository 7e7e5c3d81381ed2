"""The part of a Hugging Face model that runs its layers."""

from typing import Any


def decoder_of(model: Any) -> Any:
    """A causal language model's decoder: from token ids to the state after the final norm."""
    found = model.get_decoder()
    # Some classes name their decoder in a way that their own look-up misses.
    return model.model if found is model and hasattr(model, "model") else found
