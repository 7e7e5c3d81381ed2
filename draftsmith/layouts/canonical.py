"""What every layout is read into and written from."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from draftsmith.errors import DraftsmithError


class LayoutError(DraftsmithError):
    """A draft directory that cannot be read, is damaged, contradicts itself, or may not be overwritten."""


@dataclass(frozen=True)
class CanonicalDraft:
    """A draft directory in canonical terms.

    config: the fields of `DraftConfig` (not validated here: layouts know how files spell fields, not what is
    allowed); tensors: canonical name (z-lab's, without prefix) -> tensor as stored; layout: the name of the layout it
    was read as; ignored: names of tensors in the files that drafts do not have (a copy of the target's embedding,
    say); notes: what else a reader should be told.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    layout: str
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Layout(Protocol):
    """One way of spelling a draft in files."""

    name: str

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether a `config.json` is of this layout."""
        ...

    def read(self, config: dict[str, Any], tensors: dict[str, Tensor], strict: bool) -> CanonicalDraft:
        """Files -> canonical. strict: fields that nobody knows are errors, otherwise notes."""
        ...

    def write(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Canonical -> (the content of `config.json`, tensors by their names in the file)."""
        ...
