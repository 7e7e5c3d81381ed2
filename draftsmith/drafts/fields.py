"""What the package knows of the fields of a draft's configuration beside their types: one table, made of the notes on
`DraftConfig`, from which follow the recipe's draft section, what layouts read and write, and what a warm start says."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from pydantic.fields import FieldInfo

from draftsmith.layouts.spelling import FieldSpelling, Place


class Origin(Enum):
    """Where a draft that is about to be trained has a field from."""

    RECIPE = auto()
    """The recipe's draft section, under the same name; where that leaves it out, the checkpoint or a default."""
    TARGET = auto()
    """The target alone."""
    CHECKPOINT = auto()
    """The checkpoint of a warm start; a fresh draft has the default."""
    METHOD = auto()
    """The method, or several fields of the recipe together."""


class Warm(Enum):
    """What another value than the checkpoint's means to a warm start, where it does not harm what is loaded."""

    SHAPES = auto()
    """Tensors of other shapes, or other tensors: those are compared themselves."""
    FREE = auto()
    """Nothing to the weights: how the draft is used, or made afresh."""


@dataclass(frozen=True)
class Note:
    """About one field.

    about: what it says, a sentence for the recipe's schema. needed: what to set it to, for a fresh draft's field that
    no default can know. recipe_default: of the recipe's field. files: where files keep it, for fields that they spell
    by name and value alone. dimension: whether some tensor of a draft has a dimension at least as large. warm: the
    effect on loaded weights of another value than they were trained with, or why there is none.
    """

    about: str
    origin: Origin = Origin.RECIPE
    needed: str | None = None
    recipe_default: Any = None
    files: Place | None = None
    dimension: bool = False
    warm: str | Warm = Warm.SHAPES


@dataclass(frozen=True)
class Declared:
    """A field as its model declares it: the model, its flat name, the field of the model, and the note on it."""

    owner: type
    name: str
    info: FieldInfo
    note: Note

    @property
    def spelling(self) -> FieldSpelling | None:
        """What layouts are told of it, where its name and value are all."""
        if self.note.files is None:
            return None
        default = ... if self.info.is_required() else self.info.default
        return FieldSpelling(self.name, self.note.files, default)


def declared(fields: Mapping[str, FieldInfo], owner: type) -> Iterator[Declared]:
    """The fields of a model, in order. Raises `TypeError` for one without a note."""
    for name, info in fields.items():
        notes = [entry for entry in info.metadata if isinstance(entry, Note)]
        if len(notes) != 1:
            raise TypeError(f"{owner.__name__}.{name} has {len(notes)} notes; every field of a configuration has one")
        yield Declared(owner, name, info, notes[0])
