"""How long jobs report where they are, without knowing who listens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Stage(Protocol):
    """One running stage: `advance(n)` says that n more units are done."""

    def advance(self, amount: float = 1.0, **fields: str) -> None: ...


class Progress(Protocol):
    """Opens stages: `with progress.stage("capture", total=1000, unit="tokens") as stage: stage.advance(10)`."""

    def stage(self, name: str, total: float | None, unit: str): ...  # type: ignore[no-untyped-def]


class _SilentStage:
    def advance(self, amount: float = 1.0, **fields: str) -> None:
        pass


class SilentProgress:
    """Reports to nobody."""

    @contextmanager
    def stage(self, name: str, total: float | None, unit: str) -> Iterator[Stage]:
        yield _SilentStage()
