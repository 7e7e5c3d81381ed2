"""Tiny random targets of every supported kind."""

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from draftsmith.targets.target import Target

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma3")

_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


def tiny_model(
    kind: str = "llama",
    *,
    vocab_size: int = 97,
    hidden_size: int = 32,
    num_layers: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> Any:
    """A random Hugging Face causal LM.

    kind: one of `KINDS`, or "qwen3_moe", whose second layer has no experts.
    Mistral has a sliding window of 8 on every layer; Gemma 3 has one on every other layer, and soft-capped logits.
    Weights are larger than a fresh model's, and norms are not all ones, so that attention and norms matter.
    """
    config_class, model_class = _CLASSES[kind]
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": kind == "gemma3",
    }
    if kind == "qwen2":
        del fields["head_dim"]
    if kind == "mistral":
        fields["sliding_window"] = 8
    if kind == "qwen3_moe":
        fields |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
        fields |= {"mlp_only_layers": [1]}
    if kind == "gemma3":
        kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers)]
        fields |= {"sliding_window": 8, "layer_types": kinds}
        fields |= {"query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0}
    fields |= config_overrides
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**fields)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif name.endswith("bias"):
                    parameter.normal_(std=0.2)
    return model.to(dtype)


def tiny_target(kind: str = "llama", **options: Any) -> Target:
    """A random `Target` of a kind in `KINDS`, without a tokenizer; options as for `tiny_model`."""
    return Target.from_model(tiny_model(kind, **options))
