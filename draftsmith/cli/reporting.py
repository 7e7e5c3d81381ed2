"""How a command speaks to its user: results, errors and an interruption."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from draftsmith.errors import DraftsmithError
from draftsmith.parallel.ranks import is_first


def say(line: str) -> None:
    """One line of result on standard error: standard output is for what a program may read. Of several processes that a
    launcher started, the first one speaks."""
    if is_first():
        Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def reporting(run: Path | None = None) -> Iterator[None]:
    """A user's error is one message and exit status 1; Ctrl-C says what is kept in `run`, and exits with 130."""
    complaints = Console(stderr=True)
    try:
        yield
    except DraftsmithError as error:
        complaints.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        how = "the same command goes on from there (train: with --resume)"
        kept = f" What is finished is kept in {run}: {how}." if run else ""
        complaints.print(f"interrupted.{kept}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
