"""The bases of a method's typed options."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from typing_extensions import TypeVar

from draftsmith.drafts.checks import describe
from draftsmith.errors import DraftsmithError


class Options(BaseModel):
    """Base of every typed options block: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DecodingOptions(Options):
    """What every method's drafter can be told; each method with options of its own derives its class.

    `num_proposals`: tokens proposed a step, at most what the draft has room for (None: all of them).
    """

    num_proposals: Annotated[StrictInt, Field(ge=1)] | None = None


DecodingT = TypeVar("DecodingT", bound=DecodingOptions, default=DecodingOptions)


def parse_decoding_options(
    method: str, kind: type[DecodingT], own: Mapping[str, Any], num_proposals: int | None = None
) -> DecodingT:
    """The typed decoding options of `method`, of the class `kind`; own: those that only it has, by name.

    Raises `DraftsmithError`, which names each fault, for options that it does not have and values that do not fit.
    """
    known = kind.model_fields.keys() - DecodingOptions.model_fields.keys()
    if "num_proposals" in own:
        raise DraftsmithError(f"num_proposals is no option of {method} alone; set engine.num_proposals")
    if own and not known:
        named = ", ".join(f"{name}={value!r}" for name, value in sorted(own.items()))
        raise DraftsmithError(f"{method} has no decoding options of its own; remove {named}")
    try:
        return kind(num_proposals=num_proposals, **own)
    except ValidationError as error:
        fields = [name for name in kind.model_fields if name in known]
        raise DraftsmithError(describe(error, f"the decoding options of {method}", fields)) from None
