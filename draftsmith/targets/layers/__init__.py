"""Kinds of a target's layers, one file a kind: what each keeps of a text, and how it runs over that."""

from collections.abc import Sequence

from draftsmith.errors import DraftsmithError
from draftsmith.targets.layers.attention import FullAttention
from draftsmith.targets.layers.gated_delta import GatedDelta, JoinedGatedDelta, KimiDelta, OlmoGatedDelta
from draftsmith.targets.layers.kind import LayerKind
from draftsmith.targets.layers.window import WindowAttention

__all__ = ["LayerKind", "known_kinds", "register_layer_kind"]

_ANY = ""
_KINDS: dict[tuple[str, str], LayerKind] = {}
"""By name and model type."""


def register_layer_kind(kind: LayerKind) -> None:
    """Makes a kind known under its name, for its model types. Raises `DraftsmithError` for a name that is taken."""
    for model_type in kind.model_types or (_ANY,):
        if (kind.name, model_type) in _KINDS:
            of_type = f" of {model_type} models" if model_type else ""
            raise DraftsmithError(f"there is a layer kind named {kind.name!r}{of_type} already; choose another name")
        _KINDS[kind.name, model_type] = kind


def known_kinds(names: Sequence[str], source: str, model_type: str = _ANY) -> tuple[LayerKind, ...]:
    """The kinds of these names in a model of this type. Raises `DraftsmithError`, which names the target `source`,
    where one is not known."""
    found = {name: _KINDS.get((name, model_type)) or _KINDS.get((name, _ANY)) for name in names}
    unknown = sorted(name for name, kind in found.items() if kind is None)
    if unknown:
        others = sorted({kind for name, kind in _KINDS if name in unknown and kind})
        elsewhere = f", and such layers of {', '.join(others)}" if others else ""
        raise DraftsmithError(
            f"target {source} ({model_type}) has layers of kind {', '.join(unknown)}; draftsmith decodes targets "
            f"with {' and '.join(sorted(name for name, kind in _KINDS if not kind))}{elsewhere}"
        )
    return tuple(kind for name in names if (kind := found[name]) is not None)


for _kind in (FullAttention(), WindowAttention(), GatedDelta(), JoinedGatedDelta(), OlmoGatedDelta(), KimiDelta()):
    register_layer_kind(_kind)
