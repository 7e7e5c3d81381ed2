"""Every method, by name."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.algorithms.dflash import DFlash, DFlashSection
from draftsmith.algorithms.dflash2 import DFlash2, DFlash2Section
from draftsmith.algorithms.domino import Domino, DominoSection
from draftsmith.algorithms.dspark import DSpark, DSparkSection
from draftsmith.algorithms.dta import DTA, DTASection
from draftsmith.drafts.checks import nearest
from draftsmith.drafts.config import DraftConfig
from draftsmith.errors import DraftsmithError

_ALGORITHMS: dict[str, Algorithm] = {method.name: method for method in (DFlash(), DFlash2(), Domino(), DSpark(), DTA())}


def all_algorithms() -> tuple[Algorithm, ...]:
    """Every registered method, in the order of the family's history."""
    return tuple(_ALGORITHMS.values())


def algorithm(name: str) -> Algorithm:
    """The method that recipes call `name` (`draft.algorithm`)."""
    if name not in _ALGORITHMS:
        raise DraftsmithError(_unknown("algorithm", name, list(_ALGORITHMS)))
    return _ALGORITHMS[name]


def algorithm_for(config: DraftConfig) -> Algorithm:
    """The method that decodes a draft of this architecture: the one that carries the architecture's name."""
    if config.architecture not in _ALGORITHMS:
        architectures = sorted({method.architecture for method in _ALGORITHMS.values()})
        raise DraftsmithError(_unknown("draft architecture", config.architecture, architectures))
    return _ALGORITHMS[config.architecture]


def _unknown(what: str, name: object, known: list[str]) -> str:
    return f"unknown {what} {name!r}; known: {', '.join(known)}{nearest(str(name), known)}"


def _check_algorithm(section: Any) -> Any:
    """Name the nearest method when a recipe's own is unknown."""
    names = list(_ALGORITHMS)
    if isinstance(section, dict) and "algorithm" in section and section["algorithm"] not in names:
        raise ValueError(_unknown("algorithm", section["algorithm"], names))
    return section


DraftSectionUnion = Annotated[
    Annotated[
        DFlashSection | DFlash2Section | DominoSection | DSparkSection | DTASection, Field(discriminator="algorithm")
    ],
    BeforeValidator(_check_algorithm),
]
"""The recipe's `draft` section, typed by its `algorithm`."""
