"""A draft's rotary embedding, as its configuration says it."""

from typing import Annotated, Any, Self

from pydantic import model_validator

from draftsmith.drafts.checks import Bool, Checked, PositiveFloat, PositiveInt, number, one_of

_SCALED = frozenset({"factor", "original_max_position_embeddings", "attention_factor"})
_ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "yarn": _SCALED | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
}
_ROPE_REQUIRED: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "yarn": frozenset({"factor"}),
    "llama3": _ROPE_FIELDS["llama3"],
}


ROPE_TYPES = tuple(_ROPE_FIELDS)
"""The kinds of rope that a draft may have."""


class RopeConfig(Checked):
    """Rotary embedding, in the fields of Hugging Face's `rope_parameters` (`layouts` turns older spellings into
    them)."""

    subject = "the draft's rope"

    rope_theta: PositiveFloat
    rope_type: Annotated[str, one_of(lambda: _ROPE_FIELDS)] = "default"
    partial_rotary_factor: PositiveFloat = 1.0
    factor: Annotated[float | None, number(minimum=1.0)] = None
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    truncate: Bool | None = None

    @property
    def theta(self) -> float:
        """The base of the frequencies."""
        return self.rope_theta

    @property
    def type(self) -> str:
        """The kind of scaling: default, linear, yarn or llama3."""
        return self.rope_type

    def as_parameters(self) -> dict[str, Any]:
        """The `rope_parameters` dictionary that transformers reads."""
        return self.model_dump(exclude_none=True)

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        if self.partial_rotary_factor > 1.0:
            raise ValueError(f"partial_rotary_factor is {self.partial_rotary_factor}; allowed: a number in (0, 1]")
        common = {"rope_theta", "rope_type", "partial_rotary_factor"}
        given = {name for name in type(self).model_fields if getattr(self, name) is not None} - common
        allowed, required = _ROPE_FIELDS[self.rope_type], _ROPE_REQUIRED[self.rope_type]
        if missing := required - given:
            raise ValueError(f"rope_type {self.rope_type!r} needs {', '.join(sorted(missing))}, which is missing")
        if strange := given - allowed:
            values = ", ".join(f"{name} = {getattr(self, name)!r}" for name in sorted(strange))
            wanted = ", ".join(sorted(allowed)) or "none"
            raise ValueError(f"rope_type {self.rope_type!r} does not use {values}; fields of this type: {wanted}")
        return self
