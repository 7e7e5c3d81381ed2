"""A target's configuration without the target."""

from dataclasses import dataclass
from typing import Any

from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config


@dataclass
class Facts:
    text_config: Any
    embedding_scale: float | None = None

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.text_config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.text_config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.text_config.max_position_embeddings


def qwen3_8b() -> Facts:
    return Facts(
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


def llama() -> Facts:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return Facts(
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


def gemma() -> Facts:
    return Facts(
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
