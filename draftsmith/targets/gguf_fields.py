"""What a GGUF file says of its model, held against what transformers made of it.

transformers passes over keys and tensors that it does not know. Here every key of the architecture must be found in the
configuration with the same value, and every number of every tensor in the model. Llama 3's rope, which files hold as a
tensor of factors, is put into the configuration. Anything else is a fault.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_ROPE_FACTORS = "rope_freqs.weight"

# Key of the architecture -> fields of configurations, of which one holds the same value.
_CARRIED: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
# Key -> the value with which it changes nothing.
_NEUTRAL: dict[str, Any] = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "attention.causal": True,
    "expert_weights_scale": 1.0,
    "nextn_predict_layers": 0,
}


def carry_over(reader: Any, model: Any) -> list[str]:
    """Puts into a model's configuration what its GGUF file says and transformers left out, where that is known.

    reader: a `gguf.GGUFReader` of the file; model: what transformers read from it. Returns what is in the file and not
    in the model, for a message; empty where the model is the file's.
    """
    config = model.config.get_text_config()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    faults = list(_keys(reader, config))
    factors = tensors.pop(_ROPE_FACTORS, None)
    if factors is not None:
        scaled = _llama3_rope(config, torch.tensor(factors.data).float().flatten())
        if scaled is None:
            faults.append(f"{_ROPE_FACTORS} (factors of rope that are not Llama 3's)")
        else:
            config.rope_parameters = scaled
    stored = sum(int(tensor.n_elements) for tensor in tensors.values())
    held = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    if stored != sum(held.values()):
        faults.append(f"tensors of {stored} numbers, of which the model has {sum(held.values())}")
    return faults


def _keys(reader: Any, config: Any) -> Iterator[str]:
    """Each key of the file's architecture that the configuration does not say, with its value."""
    prefix = f"{_value(reader.fields['general.architecture'])}."
    for name, field in reader.fields.items():
        if not name.startswith(prefix):
            continue
        key, value = name.removeprefix(prefix), _value(field)
        if key == "rope.freq_base":
            found = [_rope(config).get("rope_theta")]
        elif key == "rope.dimension_count":
            found = [int(_head_dim(config) * (_rope(config).get("partial_rotary_factor") or 1.0))]
        elif key in _NEUTRAL:
            found = [_NEUTRAL[key]]
        else:
            found = [getattr(config, field_name, None) for field_name in _CARRIED.get(key, ())]
        if not any(_equal(value, other) for other in found):
            yield f"{name} = {value!r}"


def _value(field: Any) -> Any:
    """What a field holds: a text, a number, or a list of these."""
    from gguf import GGUFValueType

    texts = field.types[-1] == GGUFValueType.STRING
    found = [bytes(field.parts[i]).decode() if texts else field.parts[i].tolist()[0] for i in field.data]
    return found if field.types[0] == GGUFValueType.ARRAY else found[0]


def _equal(stored: Any, found: Any) -> bool:
    if isinstance(stored, list):
        return bool(stored) and all(_equal(one, found) for one in stored)
    if isinstance(stored, float) and isinstance(found, (int, float)):
        return math.isclose(stored, found, rel_tol=1e-6)  # files keep 32 bits
    return bool(stored == found)


def _rope(config: Any) -> dict[str, Any]:
    """The rope of a configuration; that of its full layers where it has several, which is what files keep."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope if "rope_theta" in rope else rope.get("full_attention") or {}


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _llama3_rope(config: Any, factors: Tensor) -> dict[str, Any] | None:
    """The rope parameters by which every frequency is divided by its factor [head_dim / 2]; None where there are none.

    Llama 3 leaves wavelengths below original / high as they are, divides those above original / low by `factor`, and
    goes from one to the other between them; low is 1 and high is 4 in every model of it, and the number of original
    positions follows from any factor between.
    """
    rope = _rope(config)
    dim = _head_dim(config)
    if rope.get("rope_type", "default") != "default" or "rope_theta" not in rope or len(factors) != dim // 2:
        return None
    factor = float(factors.max())
    if factor == float(factors.min()) == 1.0:
        return dict(rope)
    low, high = 1.0, 4.0
    frequencies = rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    wavelengths = 2 * math.pi / frequencies
    share = (1 / factors.double() - 1 / factor) / (1 - 1 / factor)  # of the frequency as it was
    between = (share > 0.01) & (share < 0.99)
    if not bool(between.any()):
        return None
    original = (share * (high - low) + low)[between] * wavelengths[between]
    scaled = {
        "rope_type": "llama3",
        "rope_theta": rope["rope_theta"],
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": round(float(original.median())),
    }
    before = config.rope_parameters
    config.rope_parameters = scaled
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    config.rope_parameters = before
    same = torch.allclose(found.double(), frequencies / factors.double(), rtol=1e-4, atol=0)
    return scaled if same else None
