"""How files spell each layer's attention: Qwen3's fields, and Model-Optimizer's `use_swa` over them."""

from typing import Any

from draftsmith.layouts.canonical import LayoutError
from draftsmith.layouts.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"


def read_attention(fields: Fields) -> dict[str, Any]:
    """The canonical `layer_types`, `sliding_window` and `causal` (each left out where files do not say).

    `use_swa` makes every layer slide where `layer_types` names none that does; the window is `swa_window_size` or
    `sliding_window`; such layers see the whole block unless `causal` says otherwise. Raises `LayoutError` for
    contradictions.
    """
    attention = qwen3_layers(fields)
    causal = fields.get("causal", "is_causal")
    use_swa, swa_window = fields.get("use_swa"), fields.get("swa_window_size")
    if use_swa not in (None, True, False):
        raise LayoutError(f"use_swa is {use_swa!r}; allowed: true, false")
    layer_types = attention["layer_types"]
    if use_swa and isinstance(layer_types, list) and SLIDING not in layer_types:
        attention = {"layer_types": [SLIDING] * len(layer_types), "sliding_window": fields.get("sliding_window")}
        causal = False if causal is None else causal
    if swa_window is not None and any_sliding(attention):
        window = attention["sliding_window"]
        if window is not None and window != swa_window:
            raise LayoutError(f"swa_window_size is {swa_window!r}, but sliding_window is {window!r}; write it once")
        attention["sliding_window"] = swa_window
    return {name: value for name, value in {**attention, "causal": causal}.items() if value is not None}


def attention_mode(heads: Any, kv_heads: Any) -> str:
    """SpecForge's name for attention with these numbers of heads."""
    return "mha" if heads == kv_heads else "gqa"


def check_attention_mode(fields: Fields) -> None:
    """Raises `LayoutError` for an `attention_mode` (SpecForge's field) of another network, or one that contradicts the
    numbers of heads: `gqa` is any number of key and value heads, `mha` as many as query heads."""
    mode, heads, kv_heads = (fields.get(n) for n in ("attention_mode", "num_attention_heads", "num_key_value_heads"))
    if mode not in (None, "gqa", "mha"):
        raise LayoutError(
            f"attention_mode is {mode!r}; allowed: 'gqa', 'mha', since drafts here have keys and values of their own"
        )
    if mode == "mha" and heads != kv_heads:
        raise LayoutError(
            f"attention_mode is 'mha', but num_attention_heads is {heads!r} and num_key_value_heads {kv_heads!r}; "
            "allowed: 'mha' where the two are equal, 'gqa' otherwise"
        )


def any_sliding(config: dict[str, Any]) -> bool:
    """Whether a layer slides; what is no list of layers is left to the checks of the configuration."""
    layer_types = config.get("layer_types")
    return isinstance(layer_types, list | tuple) and SLIDING in layer_types


def is_causal(layer_type: str, causal: bool | None) -> bool:
    """Whether slots of such a layer see no later slots of their block: those of sliding layers do not, unless `causal`
    says it for all layers."""
    return layer_type == SLIDING if causal is None else causal


def uniform_kind(config: dict[str, Any]) -> tuple[bool, bool] | None:
    """(whether the layers slide, whether their slots see no later slots), where all layers of a canonical configuration
    agree in both; None where they do not."""
    kinds = {(kind == SLIDING, is_causal(kind, config.get("causal"))) for kind in config["layer_types"]}
    return kinds.pop() if len(kinds) == 1 else None


def qwen3_layers(fields: Fields) -> dict[str, Any]:
    """layer_types and sliding_window (None where files do not say) from Qwen3's own fields, at either level; files
    without layer_types follow Qwen3's rule for them. Raises `LayoutError` for sliding layers whose window readers
    drop."""
    window, sliding, num_layers = map(fields.get, ("sliding_window", "use_sliding_window", "num_hidden_layers"))
    layer_types, full_layers = fields.get("layer_types"), fields.get("max_window_layers")
    if layer_types is None:
        first = (28 if full_layers is None else full_layers) if sliding else num_layers  # 28: Qwen3's default
        if _counts(num_layers, first):
            layer_types = [FULL if i < first else SLIDING for i in range(num_layers)]
    if isinstance(layer_types, list) and SLIDING in layer_types:
        if sliding is False:
            raise LayoutError(
                f"layer_types has {SLIDING!r}, but use_sliding_window is false, so that readers drop the window "
                f"(sliding_window is {window!r}); set use_sliding_window to true"
            )
        return {"layer_types": layer_types, "sliding_window": window}
    return {"layer_types": layer_types, "sliding_window": None}


def _counts(*values: Any) -> bool:
    return all(isinstance(value, int) and value < 10_000 for value in values)
