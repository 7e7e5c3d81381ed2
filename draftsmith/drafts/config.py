"""The draft's configuration, parsed and validated: the one owner of rope, mask token, tapped layers and head sizes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, ValidationInfo, model_validator

from draftsmith.base.dtypes import DTYPES
from draftsmith.drafts.attention import AttentionKind
from draftsmith.drafts.checks import (
    Bool,
    Checked,
    DraftConfigError,
    PositiveFloat,
    PositiveInt,
    one_of,
)
from draftsmith.drafts.fields import Declared, Note, Origin, Warm, declared
from draftsmith.drafts.heads import HEADS, HeadConfig
from draftsmith.drafts.rope_config import RopeConfig
from draftsmith.drafts.shapes import FLAT_NAMES, BlockShape, VocabularyShape
from draftsmith.layouts.attention_fields import FULL, SLIDING, is_causal
from draftsmith.layouts.spelling import Place
from draftsmith.targets.taps import tap_fault

if TYPE_CHECKING:
    from draftsmith.targets.info import TargetInfo


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


def _head(value: Any, info: ValidationInfo) -> HeadConfig:
    """The typed head of a dictionary (or one that is typed already), as the architecture has it."""
    kind = HEADS.get(info.data.get("architecture", ""), HeadConfig)
    if isinstance(value, HeadConfig):
        if kind is not HeadConfig and type(value) is not kind:
            raise ValueError(f"head is a {type(value).__name__}; allowed: a {kind.__name__}")
        return value
    if not isinstance(value, dict):
        raise ValueError(f"head is {value!r}; allowed: a dictionary of the head's own fields")
    if kind is HeadConfig:  # an architecture that is not known, which is said already
        return HeadConfig()
    try:
        return kind.parse(value)
    except DraftConfigError as error:
        raise ValueError(str(error)) from None


_NETWORK = Place(network=True)


class DraftConfig(Checked):
    """Canonical configuration of a draft network (see `layouts` for how files spell the fields).

    Every fault raises `DraftConfigError`, which names the field, the value and what is allowed. `dtype` is the dtype
    of the exported weights; the parameters in memory may be wider. `causal` overrides, for all layers, whether slots
    of a block see later slots (None: full layers do, sliding layers do not). `head` holds the fields of the
    architecture's head, in the head's own typed configuration. `block` is the block of masked
    slots of drafts that decode one, and `vocabulary` that of drafts which know a part of the target's tokens only;
    without it the target's output head is the draft's.

    Dictionaries are flat, going in and coming out: `block_size`, `mask_token_id` and `draft_vocab_size` stand beside
    the other fields.
    """

    subject = "the draft configuration"
    other_names = FLAT_NAMES

    architecture: Annotated[str, one_of(lambda: HEADS), Note("What the network adds to the backbone.", Origin.METHOD)]
    hidden_size: Annotated[
        PositiveInt, Note("Width of the hidden states.", Origin.TARGET, files=_NETWORK, dimension=True)
    ]
    num_hidden_layers: Annotated[
        PositiveInt,
        Note("Layers of the draft.", needed="the number of layers of the draft (published drafts: 5)", files=_NETWORK),
    ]
    num_attention_heads: Annotated[PositiveInt, Note("Query heads of a layer.", files=_NETWORK, dimension=True)]
    num_key_value_heads: Annotated[PositiveInt, Note("Key and value heads of a layer.", files=_NETWORK, dimension=True)]
    head_dim: Annotated[PositiveInt, Note("Channels of a head.", files=_NETWORK, dimension=True)]
    intermediate_size: Annotated[PositiveInt, Note("Width of a layer's MLP.", files=_NETWORK, dimension=True)]
    hidden_act: Annotated[str, one_of(lambda: ["silu"]), Note("Activation of the MLP; only silu.", files=_NETWORK)] = (
        "silu"
    )
    rms_norm_eps: Annotated[
        PositiveFloat,
        Note(
            "Added to the mean square in every RMSNorm.",
            files=_NETWORK,
            warm="norms are computed otherwise than the checkpoint was trained with",
        ),
    ] = 1e-6
    vocab_size: Annotated[
        PositiveInt,
        Note(
            "Rows of the target's output head.",
            Origin.TARGET,
            files=_NETWORK,
            warm="the checkpoint was trained on the tokens of another target",
        ),
    ]
    max_position_embeddings: Annotated[
        PositiveInt, Note("Positions that the draft may be used at.", files=_NETWORK, warm=Warm.FREE)
    ]
    rope: Annotated[
        RopeConfig,
        Note(
            "The rotary embedding.",
            Origin.METHOD,
            warm="keys and queries are rotated otherwise than the checkpoint was trained with",
        ),
    ]
    layer_types: Annotated[
        tuple[str, ...],
        BeforeValidator(_sequence),
        Note(
            "Each layer's attention: full_attention or sliding_attention.",
            warm="layers see another part of the context than they were trained on",
        ),
    ]
    sliding_window: Annotated[
        PositiveInt | None,
        Note(
            "Tokens that a sliding layer sees, its own position included.",
            warm="sliding layers see another part of the context than they were trained on",
        ),
    ] = None
    causal: Annotated[
        Bool | None,
        Note(
            "Whether slots of a block see no later ones, for all layers; left out: those of sliding layers do not.",
            warm="slots see other slots of their block than they were trained on",
        ),
    ] = None
    attention_sinks: Annotated[Bool, Note("Whether each head has an attention sink.", Origin.CHECKPOINT)] = False
    initializer_range: Annotated[
        PositiveFloat,
        Note("Standard deviation of fresh weights.", Origin.CHECKPOINT, files=_NETWORK, warm=Warm.FREE),
    ] = 0.02
    dtype: Annotated[
        str,
        one_of(lambda: DTYPES),
        Note("The dtype of the exported weights.", recipe_default="bfloat16", warm=Warm.FREE),
    ] = "bfloat16"
    block: BlockShape | None = None
    vocabulary: VocabularyShape | None = None
    target_layer_ids: Annotated[
        tuple[int, ...],
        BeforeValidator(_layer_ids),
        Note(
            "The target's layers whose outputs the draft reads, counted from 0.",
            files=Place(nested=True, speculators="aux_hidden_state_layer_ids"),
            warm="the context projection meets the states of other layers than it was trained on",
        ),
    ]
    num_target_layers: Annotated[
        PositiveInt,
        Note(
            "Layers of the target.",
            Origin.TARGET,
            files=Place(speculators="num_target_layers"),
            warm="the checkpoint was trained on the states of another target",
        ),
    ]
    output_multiplier: Annotated[
        PositiveFloat,
        Note("Multiplies the logits.", files=Place(nested=True), warm="logits are scaled otherwise than in training"),
    ] = 1.0
    final_logit_softcapping: Annotated[
        PositiveFloat | None,
        Note(
            "Soft-cap c of the logits: c * tanh(logits / c).",
            files=Place(nested=True),
            warm="logits are capped otherwise than in training",
        ),
    ] = None
    input_embedding_scale: Annotated[
        PositiveFloat,
        Note(
            "Multiplies the target's embeddings as the draft reads them.",
            files=Place(nested=True),
            warm="embeddings are scaled otherwise than in training",
        ),
    ] = 1.0
    head: Annotated[
        SerializeAsAny[HeadConfig],
        BeforeValidator(_head),
        Note("The head's own fields.", Origin.METHOD, warm="the head is used otherwise than it was trained"),
    ] = Field(default_factory=dict, validate_default=True)

    @classmethod
    def parse(cls, config: "DraftConfig | dict[str, Any]") -> "DraftConfig":
        """A validated configuration from a canonical dictionary (or from one that is validated already)."""
        return config if isinstance(config, DraftConfig) else cls(**config)

    def replace(self, **changes: Any) -> "DraftConfig":
        """A copy with some fields changed (by their flat names), validated again."""
        return DraftConfig(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The canonical dictionary (JSON types; fields that are None are left out); `parse` gives the same back."""
        return _flattened(self.model_dump(mode="json", exclude_none=True))

    def flat(self) -> dict[str, Any]:
        """Every field's value by its flat name, None included."""
        return _flattened({name: getattr(self, name) for name in type(self).model_fields})

    @classmethod
    def known_fields(cls) -> list[str]:
        return list(_flattened(dict.fromkeys(cls.model_fields)))

    def block_for(self, user: str) -> BlockShape:
        """The draft's block, for what cannot do without one (`user` begins the error's sentence)."""
        if self.block is None:
            raise DraftConfigError(
                f"{user} needs a draft that fills blocks of masked slots, and a draft of architecture "
                f"{self.architecture!r} has no block (block_size, mask_token_id)"
            )
        return self.block

    def meaning(self) -> dict[str, Any]:
        """What the configuration says, however it is spelt: field -> value, with who sees whom (`attention`) in place
        of the fields that make it up."""
        spelt = {"layer_types", "sliding_window", "causal"}
        fields = {name: value for name, value in self.flat().items() if name not in spelt}
        return {**fields, "attention": self.attention_kinds}

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
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return DTYPES[self.dtype]

    @model_validator(mode="before")
    @classmethod
    def _gathered(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of block and vocabulary from a flat dictionary put where they belong."""
        gathered, parts = dict(fields), dict[str, dict[str, Any]]()
        for (part, name), flat in FLAT_NAMES.items():
            if flat in fields:
                parts.setdefault(part, {})[name] = gathered.pop(flat)
        for part, given in parts.items():
            if fields.get(part) is not None:
                raise ValueError(f"{part} is {fields[part]!r}, and its fields are given beside it too; write it once")
            gathered[part] = given
        return gathered

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for fault in self._disagreements():
            raise ValueError(fault)
        return self

    def _disagreements(self) -> Iterable[str]:
        """Faults that no field shows alone."""
        yield from self._faults_of_parts()
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
        fault = tap_fault(self.target_layer_ids, self.num_target_layers, "target_layer_ids")
        if fault is not None:
            yield fault
        yield from self.head.disagreements(self)

    def _faults_of_parts(self) -> Iterable[str]:
        """Faults of block and vocabulary against the rest."""
        if self.block is None and self.head.needs_block:
            for name in ("block_size", "mask_token_id"):
                yield f"{name} is missing; {self.subject} needs it and it has no default"
        if self.block is not None and not self.head.needs_block:
            yield (
                f"block_size is {self.block.size} and mask_token_id {self.block.mask_token_id}; allowed for "
                f"{self.architecture!r}: neither, since its drafts fill no blocks of masked slots"
            )
        if self.block is not None and self.block.mask_token_id >= self.vocab_size:
            yield (
                f"mask_token_id is {self.block.mask_token_id}; allowed: an id below vocab_size, which is "
                f"{self.vocab_size} (an unused id of the target's vocabulary)"
            )
        if self.vocabulary is not None and not self.head.own_vocabulary:
            yield (
                f"draft_vocab_size is {self.vocabulary.size}; allowed for {self.architecture!r}: none, since its "
                "drafts use the target's output head"
            )
        if self.vocabulary is not None and self.vocabulary.size > self.vocab_size:
            yield (
                f"draft_vocab_size is {self.vocabulary.size}; allowed: 1 to {self.vocab_size}, the target's tokens "
                "(vocab_size)"
            )


def _table() -> Iterator[Declared]:
    parts: dict[str, type[BaseModel]] = {"block": BlockShape, "vocabulary": VocabularyShape}
    for name, info in DraftConfig.model_fields.items():
        if name not in parts:
            yield from declared({name: info}, DraftConfig)
            continue
        for field in declared(parts[name].model_fields, parts[name]):
            yield replace(field, name=FLAT_NAMES[name, field.name])


def _flattened(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields by their flat names: those of block and vocabulary in the place of these."""
    flat: dict[str, Any] = {}
    for field, value in fields.items():
        inner = {name: flat_name for (part, name), flat_name in FLAT_NAMES.items() if part == field}
        for name, flat_name in inner.items():
            flat[flat_name] = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        if not inner:
            flat[field] = value
    return flat


def check_against_target(config: DraftConfig, target: "TargetInfo") -> None:
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


FIELDS: Mapping[str, Declared] = {field.name: field for field in _table()}
"""Every field by its flat name, as its model declares it."""
