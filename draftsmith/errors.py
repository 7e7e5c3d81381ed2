"""The one base class of every error that draftsmith raises for something the user can mend, and what it says of
settings that differ."""

from collections.abc import Iterator, Mapping
from typing import Any


class DraftsmithError(Exception):
    """A fault in the user's input, data or environment.

    The message names the thing, the value found, what is allowed, and the fix. The command line prints it without a
    traceback and exits with status 1; anything that is not a `DraftsmithError` is a defect of draftsmith and keeps its
    traceback. Rooms may derive their own classes where a caller needs to tell them apart.
    """


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The leaves in which nested mappings differ: (dotted name, value before, value now), `NOT_SET` where one has none.

    In the order of `before`, then those that only `now` has.
    """
    flat_before, flat_now = dict(_leaves(before)), dict(_leaves(now))
    pairs = ((name, flat_before.get(name, NOT_SET), flat_now.get(name, NOT_SET)) for name in flat_before | flat_now)
    return [(name, old, new) for name, old, new in pairs if old != new]


class _NotSet:
    """What stands for a value that is not there: equal to no value, None included."""

    def __repr__(self) -> str:
        return "not set"


NOT_SET = _NotSet()


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner
