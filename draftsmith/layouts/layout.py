"""What a layout is: one way of spelling a draft in files."""

from typing import Any, Protocol

from torch import Tensor

from draftsmith.layouts.canonical import CanonicalDraft, TargetParts
from draftsmith.layouts.spelling import Family


class Layout(Protocol):
    """One way of spelling a draft in files."""

    name: str
    writable: bool
    carries_target: bool

    def recognises(self, config: dict[str, Any], files: frozenset[str], family: Family) -> bool:
        """Whether a directory is of this layout, from its `config.json` and the names of its files."""
        ...

    def read(self, config: dict[str, Any], tensors: dict[str, Tensor], family: Family, strict: bool) -> CanonicalDraft:
        """Files -> canonical. strict: fields of the draft's section that nobody knows are errors, otherwise notes."""
        ...

    def write(
        self, config: dict[str, Any], tensors: dict[str, Tensor], family: Family, target: TargetParts | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Canonical -> (the content of `config.json`, tensors by their names in the file).

        target: for layouts that carry parts of it; the others do not look at it. Raises `LayoutError` for a draft that
        the layout cannot express, or whose readers would run as another one.
        """
        ...
