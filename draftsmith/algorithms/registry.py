"""Every method, by name."""

from collections.abc import Callable
from typing import Annotated, Any, Union

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.algorithms.dflash import DFlash
from draftsmith.algorithms.dflash2 import DFlash2
from draftsmith.algorithms.domino import Domino
from draftsmith.algorithms.dspark import DSpark
from draftsmith.algorithms.dta import DTA
from draftsmith.algorithms.section import DraftSection
from draftsmith.drafts.checks import nearest
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.heads import HEADS, register_head
from draftsmith.errors import DraftsmithError

METHODS: tuple[type[Algorithm], ...] = (DFlash, DFlash2, Domino, DSpark, DTA)
"""The methods of the package, in the order of the family's history."""

_registered: dict[str, Algorithm] = {}
_told: list[Callable[[], object]] = []


def register(method: type[Algorithm]) -> type[Algorithm]:
    """Makes a method known by its name, with its head and its typed recipe section; a class decorator for methods from
    outside the package.

    The architecture of its head is decoded by the method of the same name, which must be registered too. Raises
    `DraftsmithError` where another method or head has the name.
    """
    found = _registered.get(method.name)
    if found is not None and type(found) is not method:
        raise DraftsmithError(f"method {method.name!r} is {type(found).__name__}; {method.__name__} needs another name")
    register_head(method.head)
    _registered[method.name] = method()
    for tell in _told:
        tell()
    return method


def unregister(name: str) -> None:
    """Forgets a method, and its head where no other method has it: for one that is to be defined again."""
    method = _registered.pop(name)
    if all(other.head is not method.head for other in _registered.values()):
        del HEADS[method.architecture]
    for tell in _told:
        tell()


def when_registered(tell: Callable[[], object]) -> None:
    """Has `tell` called whenever a method has come or gone from now on: for what is made of all methods' sections."""
    _told.append(tell)


def all_algorithms() -> tuple[Algorithm, ...]:
    """Every registered method, in the order of registration."""
    return tuple(_registered.values())


def algorithm(name: str) -> Algorithm:
    """The method that recipes call `name` (`draft.algorithm`)."""
    if name not in _registered:
        raise DraftsmithError(_unknown("algorithm", name, list(_registered)))
    return _registered[name]


def algorithm_for(config: DraftConfig) -> Algorithm:
    """The method that decodes a draft of this architecture: the one that carries the architecture's name."""
    if config.architecture not in _registered:
        architectures = sorted({method.architecture for method in _registered.values()})
        raise DraftsmithError(_unknown("draft architecture", config.architecture, architectures))
    return _registered[config.architecture]


def _unknown(what: str, name: object, known: list[str]) -> str:
    return f"unknown {what} {name!r}; known: {', '.join(known)}{nearest(str(name), known)}"


def _check_algorithm(given: Any) -> Any:
    """Name the nearest method when a recipe's own is unknown."""
    names = list(_registered)
    if isinstance(given, dict) and "algorithm" in given and given["algorithm"] not in names:
        raise ValueError(_unknown("algorithm", given["algorithm"], names))
    return given


class _OfAnyMethod:
    """Makes of `DraftSection` the sections of all methods that are registered when a model is built."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        sections = tuple(method.section for method in all_algorithms())
        union: Any = Annotated[Union[sections], Field(discriminator="algorithm")]  # noqa: UP007 - made at run time
        return handler.generate_schema(Annotated[union, BeforeValidator(_check_algorithm)])


for _method in METHODS:
    register(_method)

DraftSectionUnion = Annotated[DraftSection, _OfAnyMethod()]
"""The recipe's `draft` section, typed by its `algorithm`."""
