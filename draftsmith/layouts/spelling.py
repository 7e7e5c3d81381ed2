"""What layouts are told of the drafts that they read and write: which fields there are, and how files spell them.

The fields, and each architecture's own, are declared where the networks are (`drafts`); layouts know files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from draftsmith.layouts.canonical import LayoutError
from draftsmith.layouts.fields import Fields

ReadHead = Callable[[Fields, dict[str, Tensor]], dict[str, Any]]


@dataclass(frozen=True)
class Place:
    """Where files keep a field.

    network: whether it is a field of the network itself, by Qwen3's name (at the top level of z-lab's `config.json`, in
    speculators' `transformer_layer_config`), or one of drafts only. nested: whether z-lab's files write it in
    `dflash_config`. speculators: a drafts' own field's name in that layout, None where that layout does not have it.
    """

    network: bool = False
    nested: bool = False
    speculators: str | None = None


@dataclass(frozen=True)
class FieldSpelling:
    """How files spell one field of a draft's configuration. default: the value of a field that files leave out; ...:
    they never do."""

    name: str
    place: Place
    default: Any


@dataclass(frozen=True)
class SpeculatorsSpelling:
    """How the speculators layout spells an architecture: `architectures[0]`, whether the anchor's slot predicts, and
    whether sliding layers see the whole block where a file does not say."""

    class_name: str
    sample_from_anchor: bool
    sliding_non_causal: bool = False


@dataclass(frozen=True)
class ModelOptimizerSpelling:
    """How Model-Optimizer's files differ from z-lab's.

    own: a nested field that only they have, in place of `instead_of`; left_out: nested fields that they do not have;
    at_top: the head's fields that they have at top level too; tensor_names: prefixes of a tensor's name,
    Model-Optimizer's and the canonical one.
    """

    own: str | None = None
    instead_of: str | None = None
    left_out: tuple[str, ...] = ()
    at_top: tuple[str, ...] = ()
    tensor_names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class HeadSpelling:
    """How files spell one architecture.

    class_name: z-lab's `architectures[0]`, as written; also_known_as: names that mean it where there is no
    `projector_type`; projectors: values of `projector_type` that mean it, the first of which is written (none: the
    field is left out); repeated: the head's fields that some readers want at top level too; at_top: fields written at
    top level only, with their values; read_head: reads the head's fields where their names alone do not say it all;
    write_head: further nested fields of a canonical configuration; other_names: prefixes of tensor names of other
    writers -> canonical; anchor_predicts: whether the anchor's slot
    does, None where a field of the head says it.

    specforge: the class name that SpecForge writes; deepspec: a field of the head by which DeepSpec's files, which have
    no section, are known; speculators, modelopt: see their classes (speculators None: that layout has no such draft).

    served: consumer (`layouts.consumers`) that loads it -> canonical fields which that program does not know (`head.x`
    for the head's), and the one value that it computes.
    """

    class_name: str
    also_known_as: tuple[str, ...] = ()
    projectors: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    at_top: tuple[tuple[str, Any], ...] = ()
    read_head: ReadHead | None = None
    write_head: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    other_names: tuple[tuple[str, str], ...] = ()
    anchor_predicts: bool | None = False
    specforge: str | None = None
    deepspec: str | None = None
    speculators: SpeculatorsSpelling | None = None
    modelopt: ModelOptimizerSpelling = ModelOptimizerSpelling()
    served: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """One architecture: its name, the names of its head's own fields, how files spell it."""

    architecture: str
    head: tuple[str, ...]
    spelling: HeadSpelling

    def read_head(self, fields: Fields, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The canonical fields of the head that files say."""
        if self.spelling.read_head is not None:
            return self.spelling.read_head(fields, tensors)
        if self.spelling.anchor_predicts is False and fields.get("sample_from_anchor") is True:
            raise LayoutError(
                f"sample_from_anchor is True; allowed: false, since the anchor's slot of a {self.spelling.class_name} "
                "block predicts nothing"
            )
        return {name: value for name in self.head if (value := fields.get(name)) is not None}


@dataclass(frozen=True)
class Family:
    """All that layouts are told: the fields of every draft's configuration, and the architectures."""

    fields: tuple[FieldSpelling, ...]
    members: tuple[Member, ...]

    @property
    def network(self) -> tuple[str, ...]:
        """The fields of the network itself."""
        return tuple(spelling.name for spelling in self.fields if spelling.place.network)

    @property
    def own(self) -> tuple[FieldSpelling, ...]:
        """The fields that only drafts have."""
        return tuple(spelling for spelling in self.fields if not spelling.place.network)

    def member(self, architecture: str) -> Member:
        """The member of this architecture; `LayoutError` where no file spells such a draft."""
        for member in self.members:
            if member.architecture == architecture:
                return member
        known = ", ".join(repr(member.architecture) for member in self.members)
        raise LayoutError(f"no layout spells drafts of architecture {architecture!r}; those that are spelt: {known}")
