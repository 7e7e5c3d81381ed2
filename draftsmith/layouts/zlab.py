"""The z-lab layout: what DFlash was published in, and what SGLang, vLLM and others load."""

from typing import Any

from torch import Tensor

from draftsmith.layouts.attention_fields import SLIDING, check_attention_mode, read_attention
from draftsmith.layouts.canonical import CanonicalDraft, LayoutError, TargetParts
from draftsmith.layouts.fields import Fields, refuse_unsupported, tell_unknown
from draftsmith.layouts.layer_ids import to_layer_input_ids
from draftsmith.layouts.rope_fields import rope_parameters, written_rope
from draftsmith.layouts.spelling import Family, Member
from draftsmith.layouts.vocabulary import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT, check_whole_vocabulary

SECTION = "dflash_config"
PREFIXES = ("model.", "dflash_module.", "logit_head.")  # each may stand before another
EXTRAS = (EMBEDDING, HEAD, TARGET_TO_DRAFT, DRAFT_TO_TARGET)
SINK = "self_attn.attention_sink_bias"


class ZlabLayout:
    """Reads and writes the z-lab layout."""

    name = "zlab"
    writable = True
    carries_target = False

    def recognises(self, config: dict[str, Any], files: frozenset[str], family: Family) -> bool:
        return SECTION in config

    def read(self, config: dict[str, Any], tensors: dict[str, Tensor], family: Family, strict: bool) -> CanonicalDraft:
        """See `Layout.read`; `LayoutError` names what contradicts itself or is not supported."""
        notes: list[str] = []
        fields = Fields(config, SECTION)
        tensors, extras = canonical_tensors(tensors)
        check_whole_vocabulary(
            {without_prefix(name): tensor for name, tensor in extras.items()},
            fields.get("vocab_size"),
            fields.get("draft_vocab_size"),
        )
        member = _member(config, fields, family)
        tensors = renamed(tensors, member.spelling.other_names)
        canonical: dict[str, Any] = {"architecture": member.architecture}
        canonical |= {spelling.name: fields.get(spelling.name) for spelling in family.fields}
        canonical["rope"] = rope_parameters({"the top level": config}, fields.get("head_dim"), notes)
        canonical |= read_attention(fields)
        canonical["attention_sinks"] = read_sinks(fields, tensors)
        canonical["dtype"] = read_dtype(config, tensors, notes)
        canonical["head"] = member.read_head(fields, tensors)
        check_attention_mode(fields)
        _check_layer_inputs(fields)
        refuse_unsupported(fields)
        tell_unknown(fields.unknown(), member.architecture, strict, notes)
        if canonical["final_logit_softcapping"] == 0:  # how some files say that there is none
            canonical["final_logit_softcapping"] = None
        canonical = {name: value for name, value in canonical.items() if value is not None}
        return CanonicalDraft(canonical, tensors, self.name, sorted(extras), notes)

    def write(
        self, config: dict[str, Any], tensors: dict[str, Tensor], family: Family, target: TargetParts | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Layout.write`."""
        member = family.member(config["architecture"])
        spelling, head = member.spelling, config["head"]
        written: dict[str, Any] = {"architectures": [spelling.class_name], "model_type": "qwen3"}
        written |= {name: config[name] for name in family.network}
        written["dtype"] = config["dtype"]
        own = [field for field in family.own if field.name in config]
        written |= {field.name: config[field.name] for field in own if not field.place.nested}
        written |= written_rope(config["rope"])
        written |= written_layers(config)
        written["use_cache"] = True
        nested = {
            field.name: config[field.name]
            for field in own
            if field.place.nested and config[field.name] != field.default
        }
        if spelling.projectors:
            nested["projector_type"] = spelling.projectors[0]
        nested |= head
        if spelling.write_head is not None:
            nested |= spelling.write_head(config)
        if config.get("causal") is not None:
            # vLLM reads the one, z-lab's own package the other.
            nested["causal"] = written["is_causal"] = config["causal"]
        if config["attention_sinks"]:
            nested["attention_sink_bias"] = True
        written |= {name: head[name] for name in spelling.repeated if name in head}
        written |= dict(spelling.at_top)
        written[SECTION] = nested
        return written, tensors


def written_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen3's own fields for each layer's attention, and what is the same in all drafts."""
    sliding = SLIDING in config["layer_types"]
    return {
        "layer_types": list(config["layer_types"]),
        "use_sliding_window": sliding,
        "sliding_window": config["sliding_window"] if sliding else None,
        # Readers without layer_types slide from this layer on; with it, it says nothing.
        "max_window_layers": config["num_hidden_layers"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }


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
        if tensor.numel() == 0:  # of a head of rank 0, which is no head
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


def _member(config: dict[str, Any], fields: Fields, family: Family) -> Member:
    projector = fields.get("projector_type")
    if projector is not None:
        for member in family.members:
            if projector in member.spelling.projectors:
                return member
        known = [name for member in family.members for name in member.spelling.projectors]
        raise LayoutError(f"projector_type is {projector!r}; allowed: {', '.join(map(repr, known)) or 'no such field'}")
    named = config.get("architectures") or []
    if not isinstance(named, list):
        raise LayoutError(f"architectures is {named!r}; allowed: a list of one class name")
    for member in family.members:
        spelling = member.spelling
        names = spelling.also_known_as if spelling.projectors else (spelling.class_name, *spelling.also_known_as)
        if any(name in named for name in names):
            return member
    known = [member.spelling.class_name for member in family.members]
    raise LayoutError(f"architectures is {named!r}; allowed: one of {', '.join(map(repr, known))}")


def _check_layer_inputs(fields: Fields) -> None:
    """Raises `LayoutError` where `eagle_aux_hidden_state_layer_ids`, which vLLM captures by if it is there, are other
    layers than those that the draft was trained on (counted from one)."""
    inputs, taps = fields.get("eagle_aux_hidden_state_layer_ids"), fields.get("target_layer_ids")
    if inputs is not None and isinstance(taps, list) and all(isinstance(tap, int) for tap in taps):
        wanted = to_layer_input_ids(taps)
        if inputs != wanted:
            raise LayoutError(
                f"eagle_aux_hidden_state_layer_ids is {inputs!r}, but target_layer_ids is {taps}; allowed: the same "
                f"layers, counted from one ({wanted}), or no such field"
            )


def read_sinks(fields: Fields, tensors: dict[str, Tensor]) -> bool:
    """Whether the weights hold attention sinks; `LayoutError` where the files say otherwise."""
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
