"""The speculators layout, which vLLM serves by itself: the target's ends inside, taps counted from one."""

from typing import Any

from torch import Tensor

from draftsmith.layouts.attention_fields import any_sliding, check_attention_mode, qwen3_layers, uniform_kind
from draftsmith.layouts.canonical import CanonicalDraft, LayoutError, TargetParts
from draftsmith.layouts.consumers import SPECULATORS
from draftsmith.layouts.fields import Fields, refuse_unsupported, tell_unknown
from draftsmith.layouts.layer_ids import from_layer_input_ids, to_layer_input_ids
from draftsmith.layouts.rope_fields import rope_parameters, written_rope
from draftsmith.layouts.spelling import Family, Member, SpeculatorsSpelling
from draftsmith.layouts.variants import refuse
from draftsmith.layouts.vocabulary import EMBEDDING, HEAD, check_whole_vocabulary
from draftsmith.layouts.zlab import (
    canonical_tensors,
    read_dtype,
    read_sinks,
    renamed,
    without_prefix,
    written_layers,
)

TYPE = "speculators_model_type"
NETWORK_SECTION = "transformer_layer_config"
# Beside the fields of every Hugging Face configuration; none says what the draft computes.
_WRITERS_OWN = frozenset(
    {
        TYPE,
        "speculators_config",
        "speculators_version",
        "architectures",
        "auto_map",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
    }
)


class SpeculatorsLayout:
    """Reads and writes the speculators layout."""

    name = "speculators"
    writable = True
    carries_target = True

    def recognises(self, config: dict[str, Any], files: frozenset[str], family: Family) -> bool:
        return TYPE in config

    def read(self, config: dict[str, Any], tensors: dict[str, Tensor], family: Family, strict: bool) -> CanonicalDraft:
        """See `Layout.read`; `LayoutError` for a reduced vocabulary, for what the files do not say, and for what is not
        supported."""
        member, kind = _member(config.get(TYPE), family)
        notes: list[str] = []
        fields = Fields(_with_defaults(config, family, notes), NETWORK_SECTION)
        tensors, extras = canonical_tensors(tensors)
        parts = {without_prefix(name): tensor for name, tensor in extras.items()}
        check_whole_vocabulary(parts, fields.get("vocab_size"), fields.get("draft_vocab_size"))
        tensors = renamed(tensors, member.spelling.other_names)
        _check_own(fields, member, kind, notes)
        canonical: dict[str, Any] = {"architecture": member.architecture}
        canonical |= {name: fields.get(name) for name in family.network}
        canonical |= {name: fields.get(spelt) for name, spelt in _own(family).items()}
        canonical["target_layer_ids"] = _tap_ids(canonical["target_layer_ids"])
        canonical["rope"] = rope_parameters(
            {NETWORK_SECTION: fields.nested, "the top level": config}, fields.get("head_dim"), notes
        )
        canonical |= _attention(fields, kind)
        canonical["attention_sinks"] = read_sinks(fields, tensors)
        fields.get("dtype")  # in two places, which must agree
        canonical["dtype"] = read_dtype({**fields.nested, **config}, tensors, notes)
        canonical["head"] = member.read_head(fields, tensors)
        check_attention_mode(fields)
        refuse_unsupported(fields)
        tell_unknown(_unknown(fields), member.architecture, strict, notes)
        canonical = {name: value for name, value in canonical.items() if value is not None}
        return CanonicalDraft(canonical, tensors, self.name, sorted(extras), notes, _target_parts(config, parts))

    def write(
        self, config: dict[str, Any], tensors: dict[str, Tensor], family: Family, target: TargetParts | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Layout.write`. Carries the target's embedding and output head, in the draft's dtype."""
        faults = SPECULATORS.faults(config, family)
        if target is None:
            faults.append(
                "the target's embedding and output head are part of this layout; name the target (--target MODEL)"
            )
        refuse(self.name, faults)
        assert target is not None
        member, kind = _member(config["architecture"], family)
        for name, end in (("embedding", target.embedding), ("output head", target.output_head)):
            wanted = [config["vocab_size"], config["hidden_size"]]
            if list(end.shape) != wanted:
                raise LayoutError(f"the target's {name} is {list(end.shape)}; this draft wants {wanted}")
        kind_of_layers = uniform_kind(config)
        assert kind_of_layers is not None  # else refused above
        network: dict[str, Any] = {"model_type": "qwen3", **{name: config[name] for name in family.network}}
        network |= written_rope(config["rope"])
        network |= {"dtype": config["dtype"], **written_layers(config)}
        written = {
            "architectures": [kind.class_name],
            TYPE: member.architecture,
            **{spelt: config[name] for name, spelt in _own(family).items()},
            "draft_vocab_size": config["vocab_size"],
            "target_hidden_size": config["hidden_size"],
            "aux_hidden_state_layer_ids": to_layer_input_ids(config["target_layer_ids"]),
            "sample_from_anchor": kind.sample_from_anchor,
            # vLLM takes the opposite of this for the causality of every layer, full ones too.
            "sliding_window_non_causal": not kind_of_layers[1],
            **config["head"],
            "tie_word_embeddings": False,
            "dtype": config["dtype"],
            NETWORK_SECTION: network,
            "speculators_config": _proposals(member, kind, config["block_size"], target),
        }
        ends = {EMBEDDING: target.embedding, HEAD: target.output_head}
        dtype = next(iter(tensors.values())).dtype
        # A copy each: where the target ties them, two names of one tensor cannot go into one file.
        return written, {**tensors, **{name: end.detach().to("cpu", dtype, copy=True) for name, end in ends.items()}}


def _member(architecture: Any, family: Family) -> tuple[Member, SpeculatorsSpelling]:
    known = {m.architecture: (m, m.spelling.speculators) for m in family.members if m.spelling.speculators}
    if not isinstance(architecture, str) or architecture not in known:
        raise LayoutError(f"{TYPE} is {architecture!r}; allowed: {', '.join(map(repr, known))}")
    member, kind = known[architecture]
    assert kind is not None
    return member, kind


def _own(family: Family) -> dict[str, str]:
    """The drafts' own fields that this layout has -> their names in it."""
    return {field.name: field.place.speculators for field in family.own if field.place.speculators is not None}


def _check_own(fields: Fields, member: Member, kind: SpeculatorsSpelling, notes: list[str]) -> None:
    """Raises `LayoutError` for what this layout does not have by itself, and for another anchor's slot."""
    if fields.get("num_target_layers") is None:
        raise LayoutError(
            "num_target_layers is missing, which this layout does not have by itself; add the target's number of "
            "layers to config.json"
        )
    sampled = fields.get("sample_from_anchor")
    if sampled not in (None, kind.sample_from_anchor):
        raise LayoutError(
            f"sample_from_anchor is {sampled!r}; allowed for {member.architecture!r}: {kind.sample_from_anchor}"
        )
    if sampled is None and kind.sample_from_anchor:
        notes.append(
            "sample_from_anchor is left out: the layout's writer reads that as true, which is done here, vLLM as false"
        )


def _attention(fields: Fields, kind: SpeculatorsSpelling) -> dict[str, Any]:
    """The canonical `layer_types`, `sliding_window` and `causal`."""
    attention = qwen3_layers(fields)
    loose = fields.get("sliding_window_non_causal")
    if loose not in (None, True, False):
        raise LayoutError(f"sliding_window_non_causal is {loose!r}; allowed: true, false")
    # Full layers always see the whole block here; the field is about the sliding ones.
    loose = kind.sliding_non_causal if loose is None else loose
    return {**attention, "causal": None if any_sliding(attention) and not loose else False}


def _proposals(member: Member, kind: SpeculatorsSpelling, block_size: int, target: TargetParts) -> dict[str, Any]:
    """The section `speculators_config`: how servers are to draft, and for which target."""
    return {
        "algorithm": member.architecture,
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": block_size if kind.sample_from_anchor else block_size - 1,
                "verifier_accept_k": 1,
            }
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
    }


def _with_defaults(config: dict[str, Any], family: Family, notes: list[str]) -> dict[str, Any]:
    """The network's section with what its writer leaves out: fields that equal transformers' own defaults."""
    network = config.get(NETWORK_SECTION)
    if not isinstance(network, dict) or network.get("model_type", "qwen3") != "qwen3":
        raise LayoutError(
            f"{NETWORK_SECTION} is {network!r}; allowed: an object with the fields of a network of model_type 'qwen3'"
        )
    from transformers import Qwen3Config

    defaults = Qwen3Config().to_dict()
    said = {**config, **network}  # some writers put such fields beside the section
    left_out = {name: defaults[name] for name in family.network if name not in said}
    if not {"rope_parameters", "rope_theta", "rope_scaling"} & set(said):
        left_out["rope_parameters"] = defaults["rope_parameters"]
    if left_out:
        values = ", ".join(f"{name} = {value!r}" for name, value in left_out.items())
        notes.append(f"{NETWORK_SECTION} leaves out {values}, which are the defaults of its writer")
    return {**config, NETWORK_SECTION: {**network, **left_out}}


def _unknown(fields: Fields) -> dict[str, Any]:
    """Fields of either level that neither draftsmith reads nor the layout's writer puts there, by their places."""
    from transformers import PretrainedConfig, Qwen3Config

    network = {*Qwen3Config().to_dict(), *_WRITERS_OWN, "rope_theta", "rope_scaling", "partial_rotary_factor"}
    beside = {*PretrainedConfig().to_dict(), *_WRITERS_OWN, "rope_theta", "rope_scaling", "rope_parameters"}
    return fields.unknown(network, {*beside, "partial_rotary_factor"})


def _tap_ids(ids: Any) -> Any:
    """Layer ids counted by what a layer reads -> tap ids; anything that is no list of ids as it is, for the
    checks of the configuration."""
    if not isinstance(ids, list) or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in ids):
        return ids
    if any(layer < 1 for layer in ids):
        raise LayoutError(
            f"aux_hidden_state_layer_ids is {ids}; allowed: ids >= 1, since 0 is the embedding, which drafts do not tap"
        )
    return from_layer_input_ids(ids)


def _target_parts(config: dict[str, Any], parts: dict[str, Tensor]) -> TargetParts | None:
    if EMBEDDING not in parts or HEAD not in parts:
        return None
    section = config.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else None
    said = verifier if isinstance(verifier, dict) else {}
    name, architectures = said.get("name_or_path"), said.get("architectures")
    return TargetParts(
        name if isinstance(name, str) else None,
        tuple(architectures) if isinstance(architectures, list) else (),
        parts[EMBEDDING],
        parts[HEAD],
    )
