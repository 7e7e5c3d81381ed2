"""Options and arguments that name files: `~` is the home directory also where shells leave it alone (--out=~/x)."""

from pathlib import Path
from typing import Any

import typer

from draftsmith.base.paths import user_path
from draftsmith.errors import DraftsmithError


def cli_path(text: str) -> Path:
    """A path from the command line. typer.BadParameter: it has no such home directory."""
    try:
        return user_path(text)
    except DraftsmithError as error:
        raise typer.BadParameter(str(error)) from error


def named_path(metavar: str) -> dict[str, Any]:
    """What makes an option or argument of Typer a path that help shows under this name."""
    return {"parser": cli_path, "metavar": metavar}


PATH = named_path("PATH")
