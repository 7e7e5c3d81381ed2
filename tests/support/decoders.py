"""Small random models of every type that transformers has, made from its configuration class.

Sizes are set by the names of fields, so that a type that is added to transformers is built without anything being
written for it here. `OWN` has what a type needs beside that.
"""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

VOCABULARY = 256
WINDOW = 8
POSITIONS = 512

# Field -> value, for every configuration that has the field and gives it a value by default.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_topk_group": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Latent attention.
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # Indexers of sparse attention.
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    # Recurrent layers.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_expand": 2,
    "conv_dim": 64,
    "conv_dim_out": 64,
}


# Fields that a configuration may leave to others, and that are set where it has them at all.
_ALWAYS = {"head_dim", "num_key_value_heads", "moe_intermediate_size"}


def _has(config: PretrainedConfig, name: str) -> bool:
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[0]
    return hasattr(config, name) if name in _ALWAYS else getattr(config, name, None) is not None


def sized(config_class: type[PretrainedConfig], own: dict[str, Any]) -> PretrainedConfig:
    """A configuration with the sizes above, where it has such fields, and what is its own."""
    plain = config_class()
    readable = {name for name, member in vars(config_class).items() if isinstance(member, property)}
    fields = {name: value for name, value in SIZES.items() if name not in readable and _has(plain, name)}
    if "kv_lora_rank" in fields:  # latent attention: its head_dim is that of the rope, and each head has its own keys
        fields |= {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
    nested = {
        name: sized(part, own.get(name, {})).to_dict()
        for name, part in (config_class.sub_configs or {}).items()
        if isinstance(part, type) and issubclass(part, PretrainedConfig) and part is not AutoConfig
    }
    return config_class(**{**fields, **nested, **own})


_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_RECURRENT = ["linear_attention", "full_attention"] * 2
_HYBRID = ["conv", "full_attention", "conv", "full_attention"]

OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "cohere2": {"layer_types": _ALTERNATING},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"o_lora_rank": 16, "o_groups": 2},
    "dots1": {"n_routed_experts": 4},
    "gemma2": {"layer_types": _ALTERNATING},
    "gemma3": {"vision_config": _VISION, "mm_tokens_per_image": 4, "text_config": {"layer_types": _ALTERNATING}},
    "gemma3_text": {"layer_types": _ALTERNATING},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": _ALTERNATING},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4, "layer_types": _RECURRENT},
    "lfm2": {"layer_types": _HYBRID},
    "lfm2_moe": {"layer_types": _HYBRID, "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 3, "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16},
    "nemotron_h": {"n_groups": 2, "moe_shared_expert_intermediate_size": 32},
    "qwen4_exp_text": {
        "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "ngram_vocab_size_base": 64, "split_ngram_parts": 1,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
}  # fmt: skip


def decoder_config(name: str, **own: Any) -> PretrainedConfig:
    """The small configuration of a type; own: fields of this one."""
    return sized(CONFIG_MAPPING[name], OWN.get(name, {}) | own)


def random_decoder(config: PretrainedConfig, seed: int = 0) -> Any:
    """A model of this configuration, in evaluation mode. Matrices are so large, and norms and biases so far from their
    fresh values, that each of them shows in the output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.2)
                else:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model
