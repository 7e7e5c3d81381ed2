"""What every layout is read into and written from."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from draftsmith.errors import DraftsmithError


class LayoutError(DraftsmithError):
    """A draft directory that cannot be read, is damaged, contradicts itself, or may not be overwritten."""


@dataclass(frozen=True)
class TargetParts:
    """What some layouts carry of the target, and drafts do not have.

    name: the target's hub id or path, None where files do not say; architectures: class names of its `config.json`;
    embedding, output_head: [V, H], without any scale.
    """

    name: str | None
    architectures: tuple[str, ...]
    embedding: Tensor
    output_head: Tensor


@dataclass(frozen=True)
class CanonicalDraft:
    """A draft directory in canonical terms.

    config: the fields of `DraftConfig` (not validated here: layouts know how files spell fields, not what is
    allowed); tensors: canonical name (z-lab's, without prefix) -> tensor as stored; layout: the name of the layout it
    was read as; ignored: names of tensors in the files that drafts do not have (a copy of the target's embedding,
    say); notes: what else a reader should be told; target: the parts of the target that the files carry, if they carry
    both.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    layout: str
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    target: TargetParts | None = None
