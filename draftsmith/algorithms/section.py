"""The recipe's `draft` section: what all methods share, and the fields of a method's head, made of the notes on the
configuration that they end up in."""

import typing
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge
from pydantic import Field, StrictBool, StrictInt, create_model
from pydantic.fields import FieldInfo

from draftsmith.algorithms.options import Options
from draftsmith.base.fields import PlaceField
from draftsmith.drafts.config import FIELDS
from draftsmith.drafts.fields import Declared, Origin, declared
from draftsmith.drafts.heads import HeadConfig

SectionT = TypeVar("SectionT", bound=Options)


def _strict(kind: Any) -> Any:
    """A field's type as recipes may write it: integers and booleans are not read from other types."""
    if kind is int or kind is bool:
        return StrictInt if kind is int else StrictBool
    arguments = typing.get_args(kind)
    if not arguments:
        return kind
    if typing.get_origin(kind) is tuple:
        return tuple[tuple(map(_strict, arguments))]  # type: ignore[misc]  # made at run time
    (some,) = (_strict(argument) for argument in arguments if argument is not NoneType)
    return some


def _recipe_field(field: Declared) -> tuple[Any, FieldInfo]:
    """The type and default of the recipe's field for one of the configuration. None, where there is no default, means
    that it is left out."""
    bounds = [entry for entry in field.info.metadata if isinstance(entry, Ge)]
    kind = _strict(_plain(field.info.annotation))
    if bounds:
        kind = Annotated[kind, bounds[0]]
    default = field.note.recipe_default
    return kind if default is not None else kind | None, Field(default=default, description=field.note.about)


def _plain(annotation: Any) -> Any:
    """The annotation without what checks are attached to it."""
    if typing.get_origin(annotation) is Annotated:
        return _plain(typing.get_args(annotation)[0])
    arguments = tuple(_plain(argument) for argument in typing.get_args(annotation))
    if NoneType in arguments:
        return arguments[0] | None
    return annotation


def _extended(section: type[SectionT], fields: Iterator[Declared]) -> type[SectionT]:
    """The section with these fields behind its own."""
    made: dict[str, Any] = {field.name: _recipe_field(field) for field in fields}
    return create_model(
        section.__name__, __base__=section, __module__=section.__module__, __doc__=section.__doc__, **made
    )


def with_shared_fields(section: type[SectionT]) -> type[SectionT]:
    """The section with the fields that recipes say of every draft's configuration."""
    return _extended(section, (field for field in FIELDS.values() if field.note.origin is Origin.RECIPE))


def with_head(head: type[HeadConfig]) -> Callable[[type[SectionT]], type[SectionT]]:
    """Gives a method's section the fields of the head that its drafts have."""

    def extend(section: type[SectionT]) -> type[SectionT]:
        return _extended(section, declared(head.model_fields, head))

    return extend


@with_shared_fields
class DraftSection(Options):
    """The recipe's `draft` section as far as all methods share it; each method derives its own, with its `algorithm`
    literal, its head's sizes (`with_head`) and its `objective` options. None means: from the checkpoint of `init_from`,
    or, for a fresh draft, from the target's own configuration (`build.draft_config` says how)."""

    PLAIN: ClassVar[tuple[str, ...]] = tuple(
        name
        for name, field in FIELDS.items()
        if field.note.origin is Origin.RECIPE and name not in ("target_layer_ids", "dtype")
    )
    """Fields that mean the configuration's field of the same name, and nothing else."""

    algorithm: str
    init_from: PlaceField | None = Field(default=None, description="A draft directory to start from.")
    num_taps: StrictInt | None = Field(
        default=None, description="How many of the target's layers to read, evenly spread, in place of their ids."
    )
    rope_theta: float | None = Field(
        default=None, description="Base of a plain rotary embedding; left out: the target's rotary embedding."
    )

    def value(self, name: str) -> Any:
        """A field by its name; None: left out."""
        return getattr(self, name)

    def said(self, *names: str) -> dict[str, Any]:
        """Those of the fields that are not left out, by name."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}
