"""Types of option fields that name files and directories: `~` is read in all of them."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from draftsmith.base.paths import user_path
from draftsmith.errors import DraftsmithError


def _field_path(path: Path) -> Path:
    try:
        return user_path(path)
    except DraftsmithError as error:
        raise ValueError(str(error)) from error


def _field_place(place: str) -> str:
    return str(_field_path(Path(place))) if place.startswith("~") else place


PathField = Annotated[Path, AfterValidator(_field_path)]
"""A field of options that holds a path."""

PlaceField = Annotated[str, AfterValidator(_field_place)]
"""A field of options that holds a path or a name of something else (a hub id, a data set)."""
