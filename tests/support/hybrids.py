"""Tiny random targets of any type that transformers has, by their configuration's name."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from draftsmith.targets.target import Target

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

_ALL: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "qwen3_next": _DELTA | _EXPERTS,
    "olmo_hybrid": _DELTA | {"linear_allow_neg_eigval": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "granite_swa": {"sliding_window": 8},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "gemma4_text": {
        "sliding_window": 8,
        "hidden_size_per_layer_input": 4,
        "global_head_dim": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "kimi_linear": _LATENT
    | {
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_local_experts": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "lara_mini": _DELTA | _EXPERTS,
}
MODELS = {model_type: fields for model_type, fields in _ALL.items() if model_type in CONFIG_MAPPING}
"""model type -> fields of its configuration beyond the sizes that all share, of the types that the installed
transformers has."""


def tiny_model_of(model_type: str, *, seed: int = 0, **fields: Any) -> Any:
    """A random causal LM of a type, in fp32. Its weights are larger than a fresh model's and no norm is all ones, so
    that every part matters."""
    config = AutoConfig.for_model(model_type, **(_SIZES | MODELS[model_type] | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval().float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.2)
                else:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tiny_target_of(model_type: str, **fields: Any) -> Target:
    """`tiny_model_of`, as a target."""
    return Target.from_model(tiny_model_of(model_type, **fields))
