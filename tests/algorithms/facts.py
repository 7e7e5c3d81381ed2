"""A target's configuration without the target."""

from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

from draftsmith.targets.info import TargetInfo


def qwen3_8b() -> TargetInfo:
    return TargetInfo(
        Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        )
    )


def llama() -> TargetInfo:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return TargetInfo(
        LlamaConfig(
            vocab_size=99,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=512,
            rope_parameters=scaled,
        )
    )


def gemma() -> TargetInfo:
    return TargetInfo(
        Gemma3TextConfig(
            vocab_size=99,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=7,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        )
    )
