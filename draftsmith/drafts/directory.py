"""Draft directories in and out, for the architectures that are known: what `layouts` is told of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith import layouts
from draftsmith.drafts.checks import DraftConfigError
from draftsmith.drafts.config import FIELDS, DraftConfig
from draftsmith.drafts.heads import HEADS
from draftsmith.drafts.sizes import check_sizes
from draftsmith.layouts import CanonicalDraft, Family, TargetParts


def family() -> Family:
    """The fields of a draft's configuration and the architectures, as files spell them."""
    fields = tuple(spelling for field in FIELDS.values() if (spelling := field.spelling) is not None)
    members = tuple(member for head in HEADS.values() if (member := head.member()) is not None)
    return Family(fields, members)


def read_directory(
    path: str | Path, layout: str | None = None, *, strict: bool = False, allow_pickle: bool = False
) -> CanonicalDraft:
    """As `layouts.read_directory`, of the known architectures."""
    return layouts.read_directory(path, family(), layout, strict=strict, allow_pickle=allow_pickle)


def read_draft(
    path: str | Path, layout: str | None = None, *, strict: bool = False, allow_pickle: bool = False
) -> tuple[CanonicalDraft, DraftConfig]:
    """As `read_directory`, with the configuration checked, and its sizes against the weights: what a network may be
    made of. Raises `DraftConfigError`, too."""
    found = read_directory(path, layout, strict=strict, allow_pickle=allow_pickle)
    try:
        config = DraftConfig.parse(found.config)
        check_sizes(config, found.tensors)
    except DraftConfigError as error:
        raise DraftConfigError(f"{path}: {layouts.shortened(str(error))}") from None
    return found, config


def write_directory(
    path: str | Path,
    layout: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    extra_files: Mapping[str, str | bytes] | None = None,
    target: TargetParts | None = None,
    check: Callable[[Path], object] | None = None,
) -> None:
    """As `layouts.write_directory`, of the known architectures."""
    layouts.write_directory(path, layout, config, tensors, family(), extra_files, target, check)
