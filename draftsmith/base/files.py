"""Files that are whole or absent, and their checksums."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from draftsmith.errors import DraftsmithError

TEMPORARY_SUFFIX = ".partial"


class WriteError(DraftsmithError):
    """A file that the disk or its permissions refuse. What had its name before is still there."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the name `path` only once it is written and synced.

    A crash at any moment leaves the old file, or none, or the new one, and perhaps a file ending in ".partial".
    Raises `WriteError` where the disk refuses.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise WriteError(
            f"cannot write {path} ({error}); make room or change the permissions, then run the same command again"
        ) from error


def sync_directory(directory: Path) -> None:
    """Make renames in `directory` durable."""
    if os.name != "posix":  # elsewhere a directory cannot be opened, and a rename is durable by itself
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
