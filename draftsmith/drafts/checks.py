"""Checks of single configuration fields: each refuses with the field's name, the value found and what is allowed."""

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import Ge
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo

from draftsmith.errors import DraftsmithError

_LARGEST = 2**31 - 1  # no count or size of a network comes near; beyond, tensor shapes overflow


_FLOATS = sys.float_info.max  # compared, an integer of any size is not converted


class DraftConfigError(DraftsmithError):
    """A draft configuration that cannot be right, or that does not fit its target."""


def integer(minimum: int, name: str | None = None, maximum: int = _LARGEST) -> BeforeValidator:
    """An integer from `minimum` to `maximum` that a size can be; bools, floats and strings are refused.

    name: what errors call the field, if not by its own name.
    """

    def check(value: Any, info: ValidationInfo) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"{name or info.field_name} is {value!r}; allowed: an integer >= {minimum}")
        if value > maximum:
            raise ValueError(f"{name or info.field_name} is {value!r}; allowed: an integer <= {maximum}")
        return value

    return BeforeValidator(check)


def number(above: float | None = None, minimum: float | None = None) -> BeforeValidator:
    """A finite number > `above` or >= `minimum`."""
    allowed = f"> {above}" if above is not None else f">= {minimum}"

    def check(value: Any, info: ValidationInfo) -> float:
        fits = not isinstance(value, bool) and isinstance(value, int | float) and -_FLOATS <= value <= _FLOATS
        if not fits or (above is not None and value <= above) or (minimum is not None and value < minimum):
            raise ValueError(f"{info.field_name} is {value!r}; allowed: a finite number {allowed}")
        return float(value)

    return BeforeValidator(check)


def boolean() -> BeforeValidator:
    """True or False, not 0, 1 or a string."""

    def check(value: Any, info: ValidationInfo) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{info.field_name} is {value!r}; allowed: true or false")
        return value

    return BeforeValidator(check)


def one_of(allowed: Callable[[], Iterable[Any]]) -> BeforeValidator:
    """One of the values that `allowed()` lists (asked late, since tables may fill after import)."""

    def check(value: Any, info: ValidationInfo) -> Any:
        values = list(allowed())
        if value not in values:
            hint = nearest(str(value), [str(v) for v in values])
            raise ValueError(f"{info.field_name} is {value!r}; allowed: {', '.join(map(repr, values))}{hint}")
        return value

    return BeforeValidator(check)


PositiveInt = Annotated[int, Ge(1), integer(1)]
CountInt = Annotated[int, Ge(0), integer(0)]
PositiveFloat = Annotated[float, number(above=0.0)]
Bool = Annotated[bool, boolean()]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint " (did you mean ...?)" with the known name nearest to `name`, or nothing when none is near."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


class Checked(BaseModel):
    """A frozen model whose every fault is a `DraftConfigError`, raised by whichever way it is built."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    subject: ClassVar[str]
    """What errors call the model."""
    other_names: ClassVar[Mapping[tuple[str, ...], str]] = {}
    """Place of a nested field -> what errors call it."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise DraftConfigError(describe(error, self.subject, self.known_fields(), self.other_names)) from None

    @classmethod
    def known_fields(cls) -> list[str]:
        """The names that may be given."""
        return list(cls.model_fields)


def describe(
    error: ValidationError, subject: str, known: Iterable[str], names: Mapping[tuple[str, ...], str] | None = None
) -> str:
    """One line per fault that pydantic found in `subject`, each naming field, value and what is allowed.

    names: what a field is called, by its place, if not by that.
    """
    known = list(known)
    lines = []
    for fault in error.errors():
        place = tuple(map(str, fault["loc"]))
        name = (names or {}).get(place, ".".join(place))
        if fault["type"] == "missing":
            lines.append(f"{name} is missing; {subject} needs it and it has no default")
        elif fault["type"] == "extra_forbidden":
            lines.append(f"unknown field {name!r} in {subject}{nearest(name, known)}; allowed: {', '.join(known)}")
        elif fault["type"] == "value_error":
            lines.append(str(fault["ctx"]["error"]))
        else:
            lines.append(f"{name} is {fault['input']!r}; {fault['msg'][0].lower()}{fault['msg'][1:]}")
    return "\n".join(lines)
