"""The z-lab layout: what DFlash was published in, and what SGLang, vLLM and others load."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.layouts import dspark_fields
from draftsmith.layouts.attention_fields import SLIDING, read_attention
from draftsmith.layouts.canonical import CanonicalDraft, LayoutError, TargetParts
from draftsmith.layouts.fields import Fields, refuse_unsupported, rope_parameters, tell_unknown
from draftsmith.layouts.vocabulary import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT, check_whole_vocabulary

SECTION = "dflash_config"
PREFIXES = ("model.", "dflash_module.", "logit_head.")  # each may stand before another
EXTRAS = (EMBEDDING, HEAD, TARGET_TO_DRAFT, DRAFT_TO_TARGET)
SINK = "self_attn.attention_sink_bias"


@dataclass(frozen=True)
class Member:
    """How one architecture of the family is spelt.

    class_name: `architectures[0]` as written; also_known_as: names that mean it where there is no `projector_type`;
    projectors: values of `projector_type` that mean it, the first of which is written (none: the field is left out);
    head: names of its own fields, nested in `dflash_config`; repeated: those that some readers want at top level too;
    at_top: fields written at top level only, with their values; read_head: reads the head's fields where their names
    alone do not say it all; write_head: further nested fields of a canonical configuration; other_names: prefixes of
    tensor names of other writers -> canonical.
    """

    architecture: str
    class_name: str
    also_known_as: tuple[str, ...] = ()
    projectors: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    at_top: tuple[tuple[str, Any], ...] = ()
    read_head: Callable[[Fields, dict[str, Tensor]], dict[str, Any]] | None = None
    write_head: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    other_names: tuple[tuple[str, str], ...] = ()


_DSPARK_HEAD = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
FAMILY = (
    Member("dflash", "DFlashDraftModel"),
    Member(
        "dflash2",
        "DFlash2DraftModel",
        head=("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
        # Published files hold the bare names; a module that keeps the codebooks as embeddings writes the longer ones.
        other_names=tuple(
            (f"candidate_selector.{name}.weight", f"candidate_selector.{name}")
            for name in ("predecessor_codebook", "successor_codebook")
        ),
    ),
    Member(
        "domino",
        "DFlashDraftModel",
        also_known_as=("DominoDraftModel",),
        projectors=("domino", "causal_v5"),  # the second is an older spelling
        head=("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"),
        repeated=("emb_dim",),
    ),
    Member(
        "dspark",
        "Qwen3DSparkModel",  # what SGLang looks for
        also_known_as=("Qwen3DSparkModel", "DSparkDraftModel"),
        projectors=("dspark",),
        head=_DSPARK_HEAD,
        repeated=_DSPARK_HEAD,
        # SGLang and vLLM read it here; vLLM takes the nested one for DFlash's, and does not start.
        at_top=(("sample_from_anchor", True),),
        read_head=dspark_fields.read_head,
        write_head=dspark_fields.write_head,
        other_names=dspark_fields.OTHER_NAMES,
    ),
)

# Read nested first, then at top level.
_SHARED = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
)
NETWORK = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "initializer_range",
)


class ZlabLayout:
    """Reads and writes the z-lab layout."""

    name = "zlab"
    writable = True
    carries_target = False

    def recognises(self, config: dict[str, Any], files: frozenset[str]) -> bool:
        return SECTION in config

    def read(self, config: dict[str, Any], tensors: dict[str, Tensor], strict: bool) -> CanonicalDraft:
        """See `Layout.read`; `LayoutError` names what contradicts itself or is not supported."""
        notes: list[str] = []
        fields = Fields(config, SECTION)
        tensors, extras = canonical_tensors(tensors)
        check_whole_vocabulary(
            {without_prefix(name): tensor for name, tensor in extras.items()},
            fields.get("vocab_size"),
            fields.get("draft_vocab_size"),
        )
        member = _member(config, fields)
        tensors = renamed(tensors, member.other_names)
        canonical: dict[str, Any] = {"architecture": member.architecture}
        canonical |= {name: fields.get(name) for name in (*NETWORK, *_SHARED)}
        canonical["rope"] = rope_parameters(config)
        canonical |= read_attention(fields)
        canonical["attention_sinks"] = _sinks(fields, tensors)
        canonical["dtype"] = read_dtype(config, tensors, notes)
        if member.read_head is not None:
            canonical["head"] = member.read_head(fields, tensors)
        else:
            canonical["head"] = {name: value for name in member.head if (value := fields.get(name)) is not None}
            if fields.get("sample_from_anchor") is True and "shift_label" not in member.head:
                raise LayoutError(
                    f"sample_from_anchor is True; allowed: false, since the anchor's slot of a {member.class_name} "
                    "block predicts nothing"
                )
        refuse_unsupported(fields)
        tell_unknown(fields.unknown(), member.architecture, strict, notes)
        if canonical["final_logit_softcapping"] == 0:  # how some files say that there is none
            canonical["final_logit_softcapping"] = None
        canonical = {name: value for name, value in canonical.items() if value is not None}
        return CanonicalDraft(canonical, tensors, self.name, sorted(extras), notes)

    def write(
        self, config: dict[str, Any], tensors: dict[str, Tensor], target: TargetParts | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Layout.write`."""
        member = next(member for member in FAMILY if member.architecture == config["architecture"])
        written: dict[str, Any] = {"architectures": [member.class_name], "model_type": "qwen3"}
        written |= {name: config[name] for name in NETWORK}
        written |= {name: config[name] for name in ("dtype", "block_size", "num_target_layers")}
        written |= written_rope(config["rope"])
        sliding = SLIDING in config["layer_types"]
        written |= {
            "layer_types": list(config["layer_types"]),
            "use_sliding_window": sliding,
            "sliding_window": config["sliding_window"] if sliding else None,
            # Readers without layer_types slide from this layer on; with it, it says nothing.
            "max_window_layers": config["num_hidden_layers"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
        }
        nested: dict[str, Any] = {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": list(config["target_layer_ids"]),
        }
        if member.projectors:
            nested["projector_type"] = member.projectors[0]
        nested |= config["head"]
        if member.write_head is not None:
            nested |= member.write_head(config)
        for name, usual in (
            ("output_multiplier", 1.0),
            ("input_embedding_scale", 1.0),
            ("final_logit_softcapping", None),
        ):
            if config.get(name, usual) != usual:
                nested[name] = config[name]
        if config.get("causal") is not None:
            # vLLM reads the one, z-lab's own package the other.
            nested["causal"] = written["is_causal"] = config["causal"]
        if config["attention_sinks"]:
            nested["attention_sink_bias"] = True
        written |= {name: config["head"][name] for name in member.repeated if name in config["head"]}
        written |= dict(member.at_top)
        written[SECTION] = nested
        return written, tensors


def without_prefix(name: str) -> str:
    """A tensor's name without the wrappers that writers put around the draft."""
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


def canonical_tensors(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors without prefix and without known extras, the extras by their full names)."""
    canonical: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    extras: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = without_prefix(full)
        if name in EXTRAS or name.startswith("rotary_emb."):
            extras[full] = tensor
            continue
        if name in canonical:
            raise LayoutError(f"the weights hold both {origin[name]} and {full}, which mean the same; remove one")
        canonical[name], origin[name] = tensor, full
    return canonical, extras


def renamed(tensors: dict[str, Tensor], other_names: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    """The tensors by canonical names; other_names: (prefix of another writer, canonical prefix). Raises `LayoutError`
    for two tensors that mean the same."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        canonical = next((new + name.removeprefix(old) for old, new in other_names if name.startswith(old)), name)
        if canonical in renamed or (canonical != name and canonical in tensors):
            raise LayoutError(f"the weights hold {canonical} under two names, one of them {name}; remove one")
        renamed[canonical] = tensor
    return renamed


def _member(config: dict[str, Any], fields: Fields) -> Member:
    projector = fields.get("projector_type")
    if projector is not None:
        for member in FAMILY:
            if projector in member.projectors:
                return member
        known = [name for member in FAMILY for name in member.projectors]
        raise LayoutError(f"projector_type is {projector!r}; allowed: {', '.join(map(repr, known)) or 'no such field'}")
    named = config.get("architectures") or []
    if not isinstance(named, list):
        raise LayoutError(f"architectures is {named!r}; allowed: a list of one class name")
    for member in FAMILY:
        names = member.also_known_as if member.projectors else (member.class_name, *member.also_known_as)
        if any(name in named for name in names):
            return member
    known = [member.class_name for member in FAMILY]
    raise LayoutError(f"architectures is {named!r}; allowed: one of {', '.join(map(repr, known))}")


def _sinks(fields: Fields, tensors: dict[str, Tensor]) -> bool:
    said, held = fields.get("attention_sink_bias"), any(name.endswith(SINK) for name in tensors)
    if said is not None and bool(said) != held:
        held_text = "holds" if held else "does not hold"
        raise LayoutError(f"attention_sink_bias is {said!r}, but the weights file {held_text} {SINK} tensors")
    return held


def read_dtype(config: dict[str, Any], tensors: dict[str, Tensor], notes: list[str]) -> str | None:
    """The dtype that the files declare, or, with a note, the one that all tensors hold. Raises `LayoutError` for two
    that differ, and for tensors of several dtypes of which none is declared."""
    names: set[str] = set()
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        if value is not None and not isinstance(value, str):
            raise LayoutError(f"{name} is {value!r}; allowed: the name of a dtype")
        names |= {value.removeprefix("torch.")} if value is not None else set()
    if len(names) > 1:
        raise LayoutError(f"dtype is {config['dtype']!r}, but torch_dtype is {config['torch_dtype']!r}; write it once")
    if names:
        return names.pop()
    held = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    if len(held) != 1:
        raise LayoutError(f"dtype is missing, and the weights hold {held}; say in config.json which is meant")
    notes.append(f"config.json declares no dtype; the weights hold {held[0]}")
    return held[0]


def written_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_parameters` for transformers 5, `rope_theta` and `rope_scaling` for older readers."""
    partial = rope.get("partial_rotary_factor", 1.0)
    parameters = {name: value for name, value in rope.items() if name != "partial_rotary_factor" or partial != 1.0}
    scaling = {name: value for name, value in parameters.items() if name not in ("rope_theta", "partial_rotary_factor")}
    written = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": parameters,
    }
    if partial != 1.0:
        written["partial_rotary_factor"] = partial
    return written
