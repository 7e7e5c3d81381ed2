"""Paths as people write them, `~` among them."""

from pathlib import Path

from draftsmith.errors import DraftsmithError


def user_path(path: str | Path) -> Path:
    """A path with `~` and `~NAME` as the home directories that they mean. DraftsmithError: nobody of that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DraftsmithError(
            f"{path}: there is no home directory {Path(path).parts[0]}; write the path out (./~... for a file that is "
            "called so)"
        ) from error
