"""A draft from one layout of files into another, bit by bit."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.directory import read_directory, read_draft, write_directory
from draftsmith.drafts.draft import Draft, check_weights
from draftsmith.errors import DraftsmithError
from draftsmith.layouts import CARRY_TARGET, CanonicalDraft, TargetParts
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.location import locate, read_config


@dataclass(frozen=True)
class Converted:
    """What `convert` did: the layouts it read and wrote, how many tensors the draft has, the names of tensors that are
    not the draft's, and what else the reader noted."""

    source_layout: str
    layout: str
    architecture: str
    tensors: int
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The same for a reader, one fact a line."""
        said = [f"{self.architecture} draft of {self.tensors} tensors: {self.source_layout} -> {self.layout}"]
        if self.ignored:
            said.append(f"not the draft's own: {', '.join(self.ignored)}")
        return said + self.notes


def convert(
    source: str | Path,
    destination: str | Path,
    layout: str,
    *,
    source_layout: str | None = None,
    target: TargetParts | str | None = None,
    allow_pickle: bool = False,
) -> Converted:
    """Reads a draft directory of any readable layout and writes it in `layout`, whole or not at all.

    source_layout: None: recognised from the files. target: for layouts that carry parts of it, the parts, or where the
    target lies (hub id or path); left out, those that the source carries are taken over. allow_pickle: as for
    `layouts.read_directory`. What is written is read again before it takes its place: its tensors are the source's
    bit by bit, and its configuration means the same.

    Raises `LayoutError`, `DraftConfigError` or `DraftWeightsError` for a source that is not a sound draft, before
    anything is written, `LayoutError` for a draft that `layout` cannot express, and `DraftsmithError` for a path of a
    target that no model lies at or that `layout` has no use for, and for files that do not read back as the source.
    """
    if Path(source).resolve() == Path(destination).resolve():
        raise DraftsmithError(
            f"{destination} is both what is read and what is written; give another directory to write"
        )
    if isinstance(target, str) and layout not in CARRY_TARGET:
        raise DraftsmithError(
            f"the target {target} is given, but layout {layout!r} holds nothing of it; those that do: "
            f"{', '.join(CARRY_TARGET)}; leave it out (--target)"
        )
    read, config = read_draft(source, source_layout, allow_pickle=allow_pickle)
    with torch.device("meta"):
        check_weights(Draft(config), read.tensors, str(source))
    parts = target_parts(target) if isinstance(target, str) else target

    def check(written: Path) -> None:
        if differing := _differences(config, read.tensors, read_directory(written, layout)):
            raise DraftsmithError(
                f"{destination} is not written: in layout {layout!r} it would not read back as {source}. What differs: "
                f"{', '.join(differing)}; use another layout, and report this draft"
            )

    write_directory(destination, layout, config.to_dict(), read.tensors, target=parts or read.target, check=check)
    return Converted(read.layout, layout, config.architecture, len(read.tensors), read.ignored, read.notes)


def _differences(config: DraftConfig, tensors: dict[str, Tensor], again: CanonicalDraft) -> list[str]:
    """Names of the fields and tensors that a draft read again does not have as they were."""
    wanted, found = config.meaning(), DraftConfig.parse(again.config).meaning()
    fields = [name for name, value in wanted.items() if found[name] != value]
    shared = {name: (tensor, again.tensors[name]) for name, tensor in tensors.items() if name in again.tensors}
    changed = {name for name, (a, b) in shared.items() if a.dtype != b.dtype or not torch.equal(a, b)}
    return fields + sorted(changed | (set(tensors) ^ set(again.tensors)))


def target_parts(path: str) -> TargetParts:
    """What layouts may carry of the target at `path`: its name, embedding and output head (no other weight is read).

    Raises `DraftsmithError` for a path without a model.
    """
    return parts_of(TargetEnds.load(path), path)


def parts_of(
    ends: TargetEnds, path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> TargetParts:
    """The same for ends that are loaded already: [V, H] each, in their dtype; only the configuration is read."""
    architectures = read_config(locate(path), revision, trust_remote_code).architectures
    return TargetParts(path, tuple(architectures or ()), ends.embedding_weight, ends.head_weight)
