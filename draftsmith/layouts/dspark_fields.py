"""How files spell DSpark's head: SpecForge, Model-Optimizer and SGLang have each their own names for its fields."""

from typing import Any

from torch import Tensor

from draftsmith.layouts.canonical import LayoutError
from draftsmith.layouts.fields import Fields

CONFIDENCE_WEIGHT = "confidence_head.proj.weight"

# Model-Optimizer writes the head's modules flat.
OTHER_NAMES = (
    ("markov_w1.", "markov_head.markov_w1."),
    ("markov_w2.", "markov_head.markov_w2."),
    ("gate_proj.", "markov_head.gate_proj."),
    ("joint_proj.", "markov_head.joint_proj."),
    ("confidence_proj.", "confidence_head.proj."),
)


def read_head(fields: Fields, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The canonical head fields. What files leave out: the head type is vanilla, and the weights show whether there is
    a confidence head and whether it reads the Markov embedding.

    Raises `LayoutError` for blocks that do not predict from the anchor's slot, and for an `attention_mode` that
    contradicts the numbers of heads.
    """
    for name in ("sample_from_anchor", "shift_label"):
        value = fields.get(name)
        if value is not None and value is not True:
            raise LayoutError(
                f"{name} is {value!r}; allowed: true, since the anchor's slot of a DSpark block predicts the next token"
            )
    _check_attention_mode(fields)
    fields.get("confidence_head_alpha")  # a weight of the training loss: nothing to apply
    head_type = fields.get("markov_head_type")
    weight = tensors.get(CONFIDENCE_WEIGHT)
    enabled = fields.get("enable_confidence_head", "use_confidence_head")
    if enabled is None:
        enabled = weight is not None
    with_markov = fields.get("confidence_head_with_markov")
    if with_markov is None or enabled is False:  # without a confidence head the field says nothing
        hidden_size = fields.get("hidden_size")
        with_markov = weight is not None and isinstance(hidden_size, int) and weight.shape[-1] > hidden_size
    head = {
        "markov_rank": fields.get("markov_rank"),
        "markov_head_type": "vanilla" if head_type is None else head_type,
        "enable_confidence_head": enabled,
        "confidence_head_with_markov": with_markov,
    }
    return {name: value for name, value in head.items() if value is not None}


def write_head(config: dict[str, Any]) -> dict[str, Any]:
    """Nested fields beside the canonical ones, by which other readers know the same."""
    return {
        "use_confidence_head": config["head"]["enable_confidence_head"],  # Model-Optimizer
        "shift_label": True,  # Model-Optimizer
        "attention_mode": _attention_mode(config["num_attention_heads"], config["num_key_value_heads"]),  # SpecForge
    }


def _attention_mode(heads: Any, kv_heads: Any) -> str:
    return "mha" if heads == kv_heads else "gqa"


def _check_attention_mode(fields: Fields) -> None:
    mode, heads, kv_heads = (fields.get(n) for n in ("attention_mode", "num_attention_heads", "num_key_value_heads"))
    if mode is None:
        return
    if mode not in ("gqa", "mha"):
        raise LayoutError(f"attention_mode is {mode!r}; allowed: 'gqa', 'mha'")
    if mode != _attention_mode(heads, kv_heads):
        raise LayoutError(
            f"attention_mode is {mode!r}, but num_attention_heads is {heads!r} and num_key_value_heads {kv_heads!r}; "
            "allowed: 'mha' where the two are equal, 'gqa' where they are not"
        )
