"""Reading fields that files spell in several places: nested first, then top level, and never two different answers."""

from collections.abc import Collection
from typing import Any

from draftsmith.layouts.canonical import LayoutError

# Fields that change a draft's numbers, and the values that draftsmith computes.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (),
    "attention_value_scale": (1.0,),
    "logit_scale": (1.0,),
    "use_gemma_norm": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "text_config": (),  # SGLang reads the fields in there before those beside it
}


class Fields:
    """The fields of a `config.json` with a nested section (z-lab's `dflash_config`). JSON null counts as absent."""

    def __init__(self, config: dict[str, Any], section: str) -> None:
        nested = config.get(section, {})
        if not isinstance(nested, dict):
            raise LayoutError(f"{section} is {nested!r}; allowed: an object")
        self.section = section
        self.top = config
        self.nested = nested
        self._read: set[str] = set()

    def get(self, *names: str) -> Any:
        """The value of a field that goes by any of these names, None when it is nowhere.

        Nested places come first; several places must agree.
        """
        self._read.update(names)
        places = {f"{self.section}.{name}": self.nested[name] for name in names if self.nested.get(name) is not None}
        places |= {name: self.top[name] for name in names if self.top.get(name) is not None}
        values = list(places.values())
        if any(value != values[0] or isinstance(value, bool) != isinstance(values[0], bool) for value in values):
            said = " but ".join(f"{place} is {value!r}" for place, value in places.items())
            raise LayoutError(f"{said}; write the field once, or the same everywhere")
        return values[0] if values else None

    def unknown(self, nested: Collection[str] = (), top: Collection[str] | None = None) -> dict[str, Any]:
        """Fields that nothing asked for, by their places.

        nested, top: names that are known at either level though nothing asks for them. top None: the top level is not
        looked at, where other software may keep what it likes.
        """
        found = {f"{self.section}.{name}": value for name, value in self._strange(self.nested, nested)}
        return found if top is None else found | dict(self._strange(self.top, {*top, self.section}))

    def _strange(self, level: dict[str, Any], known: Collection[str]) -> list[tuple[str, Any]]:
        names = sorted(set(level) - self._read - set(known))
        return [(name, level[name]) for name in names if level[name] is not None]


def refuse_unsupported(fields: Fields) -> None:
    """Raises `LayoutError` for a field by which a draft computes something else than draftsmith does."""
    for name, allowed in _SUPPORTED.items():
        value = fields.get(name)
        if value is not None and value not in allowed:
            raise LayoutError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed)) or 'none'}")
    width, hidden_size = fields.get("target_hidden_size"), fields.get("hidden_size")
    if width is not None and width != hidden_size:
        raise LayoutError(f"target_hidden_size is {width!r}, but hidden_size is {hidden_size!r}; allowed: the same")


def tell_unknown(unknown: dict[str, Any], architecture: str, strict: bool, notes: list[str]) -> None:
    """Adds fields that nobody knows (as `Fields.unknown` gives them) to the notes; strict: `LayoutError` names them."""
    if not unknown:
        return
    text = f"config.json has {', '.join(f'{place} = {value!r}' for place, value in unknown.items())}"
    if strict:
        raise LayoutError(f"{text}, which no draft of architecture {architecture!r} uses; remove it")
    notes.append(f"{text}, which draftsmith does not know and does not apply")
