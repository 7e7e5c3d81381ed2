"""Reading fields that files spell in several places: nested first, then top level, and never two different answers."""

from typing import Any

from draftsmith.layouts.canonical import LayoutError


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

    def unknown(self) -> list[str]:
        """Nested fields that nothing asked for."""
        return sorted(set(self.nested) - self._read)


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding as one `rope_parameters` dictionary, from either way of writing it.

    `rope_parameters` {rope_theta, rope_type, ...}, or `rope_theta` with `rope_scaling` {rope_type or type, factor, ...}
    and `partial_rotary_factor`. Both may be there if they agree. There is no default for theta: a draft rotated with
    another base than it was trained with is useless.
    """
    merged: dict[str, Any] = {}
    for source in ("rope_parameters", "rope_scaling"):
        given = config.get(source) or {}
        if not isinstance(given, dict):
            raise LayoutError(f"{source} is {given!r}; allowed: an object")
        if "full_attention" in given or "sliding_attention" in given:
            raise LayoutError(f"{source} is written by layer type; the layers of a draft share one rotary embedding")
        _merge(merged, {"rope_type": given.get("type")}, f"{source}.type")  # the older name
        _merge(merged, {name: value for name, value in given.items() if name != "type"}, source)
    _merge(merged, {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}, "the top level")
    if "rope_theta" not in merged:
        raise LayoutError("rope_theta is missing, at top level and in rope_parameters; it has no safe default")
    return merged


def _merge(merged: dict[str, Any], given: dict[str, Any], source: str) -> None:
    for name, value in given.items():
        if value is None:
            continue
        if name in merged and merged[name] != value:
            raise LayoutError(f"rope: {name} is {merged[name]!r}, but {value!r} in {source}; write it once")
        merged[name] = value
