"""The draft's configuration, parsed and validated: the one owner of rope, mask token, tapped layers and head sizes."""

from collections.abc import Iterable
from typing import Annotated, Any, Protocol, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from draftsmith.base.dtypes import DTYPES
from draftsmith.drafts.attention import AttentionKind
from draftsmith.drafts.checks import (
    Bool,
    DraftConfigError,
    PositiveFloat,
    PositiveInt,
    describe,
    integer,
    number,
    one_of,
)
from draftsmith.drafts.heads import HEADS, HeadConfig
from draftsmith.layouts.attention_fields import FULL, SLIDING, is_causal
from draftsmith.targets.taps import tap_fault


class _Checked(BaseModel):
    """A frozen model whose every fault is a `DraftConfigError`, raised by whichever way it is built."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise DraftConfigError(describe(error, _SUBJECTS[type(self).__name__], type(self).model_fields)) from None


_SUBJECTS = {"RopeConfig": "the draft's rope", "DraftConfig": "the draft configuration"}
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


class RopeConfig(_Checked):
    """Rotary embedding, in the fields of Hugging Face's `rope_parameters` (`layouts` turns older spellings into
    them)."""

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


def _sequence(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{info.field_name} is {value!r}; allowed: a list")
    return tuple(value)


def _layer_ids(value: Any, info: ValidationInfo) -> tuple[int, ...]:
    ids: tuple[Any, ...] = _sequence(value, info)
    for layer in ids:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ValueError(f"{info.field_name} holds {layer!r}; allowed: integers")
    return ids


class DraftConfig(_Checked):
    """Canonical configuration of a draft network (see `layouts` for how files spell the fields).

    Every fault raises `DraftConfigError`, which names the field, the value and what is allowed. `dtype` is the dtype
    of the exported weights; the parameters in memory may be wider. `causal` overrides, for all layers, whether slots
    of a block see later slots (None: full layers do, sliding layers do not). `head` holds the fields of the
    architecture's head, checked by the head's own typed configuration (`head_config`).
    """

    architecture: Annotated[str, one_of(lambda: HEADS)]
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    hidden_act: Annotated[str, one_of(lambda: ["silu"])] = "silu"
    rms_norm_eps: PositiveFloat = 1e-6
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    rope: RopeConfig
    layer_types: Annotated[tuple[str, ...], BeforeValidator(_sequence)]
    sliding_window: PositiveInt | None = None
    causal: Bool | None = None
    attention_sinks: Bool = False
    initializer_range: PositiveFloat = 0.02
    dtype: Annotated[str, one_of(lambda: DTYPES)] = "bfloat16"
    block_size: Annotated[int, integer(2)]
    mask_token_id: Annotated[int, integer(0)]
    target_layer_ids: Annotated[tuple[int, ...], BeforeValidator(_layer_ids)]
    num_target_layers: PositiveInt
    output_multiplier: PositiveFloat = 1.0
    final_logit_softcapping: PositiveFloat | None = None
    input_embedding_scale: PositiveFloat = 1.0
    head: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def parse(cls, config: "DraftConfig | dict[str, Any]") -> "DraftConfig":
        """A validated configuration from a canonical dictionary (or from one that is validated already)."""
        return config if isinstance(config, DraftConfig) else cls(**config)

    def replace(self, **changes: Any) -> "DraftConfig":
        """A copy with some fields changed, validated again."""
        return DraftConfig(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The canonical dictionary (JSON types; fields that are None are left out); `parse` gives the same back."""
        return self.model_dump(mode="json", exclude_none=True)

    def meaning(self) -> dict[str, Any]:
        """What the configuration says, however it is spelt: field -> value, with who sees whom (`attention`) in place
        of the fields that make it up, and the head with its defaults."""
        spelt = {"layer_types", "sliding_window", "causal", "head"}
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in spelt}
        return {**fields, "attention": self.attention_kinds, "head": self.head_config}

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Each layer's attention pattern."""
        return tuple(
            AttentionKind(
                window=self.sliding_window if layer_type == SLIDING else None,
                causal=is_causal(layer_type, self.causal),
            )
            for layer_type in self.layer_types
        )

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that rotate."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def head_config(self) -> HeadConfig | None:
        """The head's typed configuration, None for an architecture without a head."""
        return HEADS[self.architecture].parse(self.head)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return DTYPES[self.dtype]

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for fault in self._disagreements():
            raise ValueError(fault)
        return self

    def _disagreements(self) -> Iterable[str]:
        """Faults that no field shows alone."""
        if self.num_attention_heads % self.num_key_value_heads:
            yield (
                f"num_attention_heads is {self.num_attention_heads}; allowed: a multiple of num_key_value_heads, "
                f"which is {self.num_key_value_heads}"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            yield (
                f"head_dim {self.head_dim} x partial_rotary_factor {self.rope.partial_rotary_factor} rotates "
                f"{self.rotary_dim} channels; allowed: an even number of at least 2"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            yield (
                f"layer_types has {len(self.layer_types)} entries; allowed: one for each of the "
                f"{self.num_hidden_layers} layers (num_hidden_layers)"
            )
        for layer_type in self.layer_types:
            if layer_type not in (FULL, SLIDING):
                yield f"layer_types holds {layer_type!r}; allowed: {FULL!r}, {SLIDING!r}"
        if SLIDING in self.layer_types and self.sliding_window is None:
            yield f"sliding_window is None, but layer_types has {SLIDING!r}; allowed: an integer >= 1"
        if self.mask_token_id >= self.vocab_size:
            yield (
                f"mask_token_id is {self.mask_token_id}; allowed: an id below vocab_size, which is {self.vocab_size} "
                "(an unused id of the target's vocabulary)"
            )
        fault = tap_fault(self.target_layer_ids, self.num_target_layers, "target_layer_ids")
        if fault is not None:
            yield fault
        head = HEADS[self.architecture].parse(self.head)
        if head is not None:
            yield from head.disagreements(self)


class TargetSizes(Protocol):
    """What a draft has to agree with; `Target` has these attributes."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def check_against_target(config: DraftConfig, target: TargetSizes) -> None:
    """Refuses a draft that cannot work with this target.

    Raises `DraftConfigError` with one line per fault. `vocab_size` counts rows of the output head: a padded
    vocabulary is equal when both sides pad alike, whatever the tokenizer holds.
    """
    faults = [
        f"{name} is {found} in the draft and {wanted} in the target; allowed: the same"
        for name, found, wanted in (
            ("hidden_size", config.hidden_size, target.hidden_size),
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("num_target_layers", config.num_target_layers, target.num_layers),
        )
        if found != wanted
    ]
    if faults:
        raise DraftConfigError("the draft does not fit the target:\n" + "\n".join(faults))
