"""Kinds of a target's layers, one file a kind: what each keeps of a text, and how it runs over that."""

from collections.abc import Sequence
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.targets.layers.attention import FullAttention
from draftsmith.targets.layers.kind import LayerKind
from draftsmith.targets.layers.window import WindowAttention

__all__ = ["LayerKind", "known_kinds", "layer_kinds", "register_layer_kind"]

_KINDS: dict[str, LayerKind] = {}


def register_layer_kind(kind: LayerKind) -> None:
    """Makes a kind known under its name. Raises `DraftsmithError` for a name that is taken."""
    if kind.name in _KINDS:
        raise DraftsmithError(f"there is a layer kind named {kind.name!r} already; choose another name")
    _KINDS[kind.name] = kind


def layer_kinds(text_config: Any, num_layers: int) -> tuple[str, ...]:
    """Each layer's kind, as a Hugging Face text configuration names it (`layer_types`); full attention where it names
    none."""
    return tuple(getattr(text_config, "layer_types", None) or ["full_attention"] * num_layers)


def known_kinds(names: Sequence[str], source: str) -> tuple[LayerKind, ...]:
    """The kinds of these names. Raises `DraftsmithError`, which names the target `source`, where one is not known."""
    unknown = set(names).difference(_KINDS)
    if unknown:
        raise DraftsmithError(
            f"target {source} has layers of kind {', '.join(sorted(unknown))}; draftsmith decodes targets "
            f"with {' and '.join(sorted(_KINDS))} only"
        )
    return tuple(_KINDS[name] for name in names)


register_layer_kind(FullAttention())
register_layer_kind(WindowAttention())
