"""The configuration of the draft that a recipe asks for, complete and explicit before anything is allocated."""

from typing import Any

from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.section import DraftSection
from draftsmith.drafts.config import FIELDS, DraftConfig
from draftsmith.drafts.fields import Origin
from draftsmith.drafts.rope_config import ROPE_TYPES, RopeConfig
from draftsmith.drafts.shapes import BlockShape
from draftsmith.errors import DraftsmithError
from draftsmith.layouts.rope_fields import one_position
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.taps import default_tap_ids

# The base of a draft's rope where the target has no positions of its own (Vaswani et al., 2017).
_ROPE_THETA = 10_000.0


def draft_config(section: DraftSection, target: TargetInfo, checkpoint: DraftConfig | None = None) -> DraftConfig:
    """The draft that `section` describes, for `target`.

    What the section leaves out comes from `checkpoint`, the configuration of the draft at `section.init_from`
    (`copied_fields` says what that is); without one, attention heads, MLP width, rope, norm epsilon and positions are
    the target's (`TargetInfo` says which, where its layers differ), layers are all full attention, and as many target
    layers are tapped, evenly spread, as the draft has layers. What no default can know (`mask_token_id`, `block_size`,
    `num_hidden_layers`) is an error when missing.
    """
    method = algorithm(section.algorithm)
    if section.init_from is not None and checkpoint is None:
        raise DraftsmithError(
            f"draft.init_from is {section.init_from!r}, but no checkpoint configuration was read from there"
        )
    fields = _fresh(section, target) if checkpoint is None else _from_checkpoint(section, checkpoint)
    wanted = section.said(*section.PLAIN)
    fixed = {
        "architecture": method.architecture,
        "head": method.head_config(section) | _copied_head(section, method.architecture, checkpoint),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "dtype": section.value("dtype") if checkpoint is None or _says_dtype(section) else checkpoint.dtype,
    }
    config = DraftConfig(**(fields | wanted | fixed))
    window = wanted.get("sliding_window")
    if window is not None and all(kind.window is None for kind in config.attention_kinds):
        raise DraftsmithError(
            f"draft.sliding_window is {window}, but no layer slides: draft.layer_types is "
            f"{list(config.layer_types)}; name the sliding layers there ('sliding_attention'), or leave the window out"
        )
    return config


def copied_fields(section: DraftSection, checkpoint: DraftConfig) -> dict[str, Any]:
    """What `draft_config` takes from a checkpoint because the section does not say it: field -> value.

    The head's own fields are named `head.NAME`; fields that are None in the checkpoint as well are left out.
    """
    found, said = checkpoint.flat(), section.said(*section.PLAIN, "target_layer_ids")
    copied = {name: found[name] for name in section.PLAIN if name not in said}
    if "target_layer_ids" not in said and section.num_taps is None:
        copied["target_layer_ids"] = checkpoint.target_layer_ids
    if section.rope_theta is None:
        copied["rope"] = checkpoint.rope.as_parameters()
    if not _says_dtype(section):
        copied["dtype"] = checkpoint.dtype
    copied |= {name: found[name] for name, field in FIELDS.items() if field.note.origin is Origin.CHECKPOINT}
    head = _copied_head(section, algorithm(section.algorithm).architecture, checkpoint)
    copied |= {f"head.{name}": value for name, value in head.items()}
    return {name: value for name, value in copied.items() if value is not None}


def _fresh(section: DraftSection, target: TargetInfo) -> dict[str, Any]:
    """Defaults for a draft that starts from nothing."""
    head = algorithm(section.algorithm).head
    for name, field in FIELDS.items():
        if field.note.needed is None or (field.owner is BlockShape and not head.needs_block):
            continue
        if section.value(name) is None:
            raise DraftsmithError(f"draft.{name} is missing and has no default; set it to {field.note.needed}")
    text = target.text_config
    layers = int(section.value("num_hidden_layers"))
    return {
        "hidden_act": "silu",
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "intermediate_size": target.intermediate_size,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "max_position_embeddings": target.max_position_embeddings,
        # Block inputs are scaled as the target scales its own.
        "input_embedding_scale": target.embedding_scale if target.embedding_scale is not None else 1.0,
        "rope": _rope(section) or _target_rope(text),
        "layer_types": ("full_attention",) * layers,
        "target_layer_ids": _tap_ids(section, target.num_layers) or default_tap_ids(target.num_layers, layers),
    }


def _from_checkpoint(section: DraftSection, checkpoint: DraftConfig) -> dict[str, Any]:
    """The checkpoint's own fields, with the section's rope and taps where it has any."""
    fields = checkpoint.to_dict()
    fields["rope"] = _rope(section) or checkpoint.rope
    fields["target_layer_ids"] = _tap_ids(section, checkpoint.num_target_layers) or checkpoint.target_layer_ids
    if layers := section.value("num_hidden_layers"):
        # Another number of layers cannot fit, which the comparison of tensors says, naming every one: let it get there.
        kinds = checkpoint.layer_types
        fields["layer_types"] = tuple(kinds[min(i, len(kinds) - 1)] for i in range(layers))
    return fields


def _copied_head(section: DraftSection, architecture: str, checkpoint: DraftConfig | None) -> dict[str, Any]:
    """The head's fields that a checkpoint of the same architecture says and the recipe does not."""
    if checkpoint is None or checkpoint.architecture != architecture:
        return {}
    said = section.said(*section.model_fields_set)
    return {name: value for name, value in checkpoint.head.model_dump().items() if name not in said}


def _says_dtype(section: DraftSection) -> bool:
    return "dtype" in section.model_fields_set


def _tap_ids(section: DraftSection, num_target_layers: int) -> tuple[int, ...] | None:
    """The tapped layers as the section says them, by name or by number; None if it does not."""
    ids: tuple[int, ...] | None = section.value("target_layer_ids")
    if ids is None:
        return None if section.num_taps is None else default_tap_ids(num_target_layers, section.num_taps)
    if section.num_taps is not None and section.num_taps != len(ids):
        raise DraftsmithError(
            f"draft.num_taps is {section.num_taps} and draft.target_layer_ids names {len(ids)} layers ({list(ids)}); "
            "leave one of the two out"
        )
    return ids


def _rope(section: DraftSection) -> dict[str, Any] | None:
    return None if section.rope_theta is None else {"rope_type": "default", "rope_theta": section.rope_theta}


def _target_rope(text_config: Any) -> dict[str, Any]:
    """The target's rope; of a target that has one for each kind of layer, that of the full layers, or where these have
    none that of the others. A plain one for a target without positions."""
    kinds = getattr(text_config, "rope_parameters", None) or {}
    rope = kinds if "rope_type" in kinds else kinds.get("full_attention") or next(filter(None, kinds.values()), None)
    if rope is None:
        return {"rope_type": "default", "rope_theta": _ROPE_THETA}
    rope = one_position(rope, [])
    if rope["rope_type"] == "dynamic":  # which within the target's window is the default one
        rope = {**rope, "rope_type": "default", "factor": None, "original_max_position_embeddings": None}
    if rope["rope_type"] not in ROPE_TYPES:
        raise DraftsmithError(
            f"the target's rope is of type {rope['rope_type']!r}, and a draft's may be {', '.join(ROPE_TYPES)}; set "
            f"draft.rope_theta for a plain one (the target's is {rope['rope_theta']})"
        )
    strange = {name: value for name, value in rope.items() if value is not None and name not in RopeConfig.model_fields}
    if strange:
        named = ", ".join(f"{name} = {value!r}" for name, value in strange.items())
        raise DraftsmithError(
            f"the target's rope has {named}, which a draft's cannot have; set draft.rope_theta for a plain one (the "
            f"target's is {rope['rope_theta']})"
        )
    return {name: value for name, value in rope.items() if value is not None}
