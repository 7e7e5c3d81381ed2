"""How long a text may be before the target's rope turns the positions before it otherwise."""

import logging
from collections.abc import Iterator
from typing import Any

from draftsmith.errors import DraftsmithError

_log = logging.getLogger(__name__)

_LENGTH_DEPENDENT = ("dynamic", "longrope")


def rope_kinds(text_config: Any) -> Iterator[dict[str, Any]]:
    """The rope parameters of a Hugging Face text configuration: one dictionary, or one for each kind of layer,
    empty for a kind without positions."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    by_layer = parameters and "rope_type" not in parameters
    yield from [kind or {} for kind in parameters.values()] if by_layer else [parameters]


def length_dependent_type(text_config: Any) -> str | None:
    """The type of the rope whose frequencies transformers computes by a forward's highest position, so that no table of
    angles by position holds them; None where there is none such."""
    types = (rope.get("rope_type") for rope in rope_kinds(text_config))
    return next((kind for kind in types if kind in _LENGTH_DEPENDENT), None)


def text_window(text_config: Any) -> int:
    """Positions that a text may have.

    `max_position_embeddings`; for `longrope`, `original_max_position_embeddings` if that is less. From there on
    transformers takes other frequencies for all positions of a forward, by the highest one in it: keys that are cached,
    and rows beside a longer one, would be turned by the wrong ones, and no step's tokens would be those of a whole
    forward. (`dynamic` depends on the length too, but not before `max_position_embeddings`.) Raises `DraftsmithError`
    for a configuration without `max_position_embeddings`.
    """
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is None:
        raise DraftsmithError(
            f"the target's configuration ({type(text_config).__name__}) has no max_position_embeddings; a decoder-only "
            "causal language model is needed"
        )
    changes = [
        int(rope["original_max_position_embeddings"])
        for rope in rope_kinds(text_config)
        if rope.get("rope_type") == "longrope"
    ]
    return min([int(limit), *changes])


def tell_window(source: str, text_config: Any) -> None:
    """Warns where texts must end before the model's own last position."""
    window = text_window(text_config)
    if window < text_config.max_position_embeddings:
        _log.warning(
            "target %s: texts may have %d tokens, not %d: beyond, its rope (longrope) turns all of a text otherwise, "
            "which no cache can follow",
            source,
            window,
            text_config.max_position_embeddings,
        )
