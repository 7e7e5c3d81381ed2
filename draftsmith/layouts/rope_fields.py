"""How files spell the rotary embedding: transformers' `rope_parameters`, older fields, and what targets hand down."""

import math
from collections.abc import Mapping
from typing import Any

from draftsmith.layouts.canonical import LayoutError

_OF_SEVERAL_POSITIONS = ("mrope_section", "xdrope_section", "mrope_interleaved", "mrope_interleaved_glm")
"""Which channels turn by which of several positions of a token (multimodal targets)."""


def rope_parameters(places: Mapping[str, Mapping[str, Any]], head_dim: Any, notes: list[str]) -> dict[str, Any]:
    """The rotary embedding as one `rope_parameters` dictionary, from either way of writing it.

    `rope_parameters` {rope_theta, rope_type, ...}, or `rope_theta` with `rope_scaling` {rope_type or type, factor, ...}
    and `partial_rotary_factor`, in any of the places (by what errors call them); all that are there must agree. There
    is no default for theta: a draft rotated with another base than it was trained with is useless. notes: is told what
    is read otherwise than it stands there.
    """
    merged: dict[str, Any] = {}
    for place, config in places.items():
        for source in ("rope_parameters", "rope_scaling"):
            given = config.get(source) or {}
            if not isinstance(given, dict):
                raise LayoutError(f"{source} is {given!r}; allowed: an object")
            if "full_attention" in given or "sliding_attention" in given:
                raise LayoutError(
                    f"{source} is written by layer type; the layers of a draft share one rotary embedding"
                )
            where = f"{place}.{source}" if len(places) > 1 else source
            _merge(merged, {"rope_type": _type(given)}, where)
            _merge(merged, {name: value for name, value in given.items() if name not in ("type", "rope_type")}, where)
        _merge(merged, {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}, place)
    if "rope_theta" not in merged:
        raise LayoutError("rope_theta is missing, at top level and in rope_parameters; it has no safe default")
    return _of_rope_dim(one_position(merged, notes), head_dim, notes)


def one_position(parameters: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The parameters for tokens with one position each, as drafts' are: the channels that several positions would share
    all turn by the same one, which is the plain embedding (SGLang and vLLM compute the same)."""
    dropped = [name for name in _OF_SEVERAL_POSITIONS if parameters.get(name) is not None]
    if dropped:
        notes.append(
            f"rope: {', '.join(dropped)} is left out, since a draft's tokens have one position each, by which all "
            "channels turn alike"
        )
    return {name: value for name, value in parameters.items() if name not in _OF_SEVERAL_POSITIONS}


def _type(given: Mapping[str, Any]) -> Any:
    """The type, also by its older name; `mrope` is an older name of `default`."""
    named, older = given.get("rope_type"), given.get("type")
    named, older = ("default" if value == "mrope" else value for value in (named, older))
    if named is not None and older is not None and named != older:
        raise LayoutError(f"rope: rope_type is {named!r}, but {older!r} by its older name type; write it once")
    return older if named is None else named


def _of_rope_dim(parameters: dict[str, Any], head_dim: Any, notes: list[str]) -> dict[str, Any]:
    """`rope_dim`, the number of channels that rotate, as the share of a head's channels.

    Where it is given, servers do not look at `partial_rotary_factor`, which is then the target's.
    """
    if parameters.get("rope_dim") is None:
        return parameters
    parameters = dict(parameters)
    rotary, factor = parameters.pop("rope_dim"), parameters.pop("partial_rotary_factor", None)
    sound = all(isinstance(value, int) and not isinstance(value, bool) for value in (rotary, head_dim))
    if not sound or not 0 < rotary <= head_dim:
        raise LayoutError(f"rope_dim is {rotary!r}; allowed: an integer from 1 to head_dim, which is {head_dim!r}")
    share = rotary / head_dim
    if int(head_dim * share) != rotary:  # rounded down
        share = math.nextafter(share, 1.0)
    if factor not in (None, share):
        notes.append(
            f"rope: partial_rotary_factor is {factor!r}, but rope_dim is {rotary}, which is what servers compute with"
        )
    return {**parameters, "partial_rotary_factor": share}


def _merge(merged: dict[str, Any], given: Mapping[str, Any], source: str) -> None:
    for name, value in given.items():
        if value is None:
            continue
        if name in merged and merged[name] != value:
            raise LayoutError(f"rope: {name} is {merged[name]!r}, but {value!r} in {source}; write it once")
        merged[name] = value


def written_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_parameters` for transformers 5, `rope_theta` and `rope_scaling` for older readers."""
    partial = rope.get("partial_rotary_factor", 1.0)
    parameters = {name: value for name, value in rope.items() if name != "partial_rotary_factor" or partial != 1.0}
    scaling = {name: value for name, value in parameters.items() if name not in ("rope_theta", "partial_rotary_factor")}
    written = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": parameters,
    }
    if partial != 1.0:
        written["partial_rotary_factor"] = partial
    return written
