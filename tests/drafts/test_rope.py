"""Rotary embedding: closed form, agreement with transformers, and no loss under dtype changes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.rope import Rope, rotate
from tests.support.tiny_draft import tiny_draft

TARGET = SimpleNamespace(hidden_size=32, num_layers=4, vocab_size=97)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(**rope: Any) -> DraftConfig:
    return tiny_draft(TARGET, head_dim=16, rope={"rope_theta": 10000.0, **rope}).config


def test_angles_are_position_over_powers_of_theta() -> None:
    positions = torch.tensor([[0, 1, 7], [511, 512, 4095]])
    cosine, sine = Rope(config(rope_theta=500.0))(positions)
    frequencies = 500.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angles = positions.double()[..., None] * frequencies
    torch.testing.assert_close(cosine.double(), torch.cat((angles.cos(), angles.cos()), -1), atol=5e-4, rtol=0)
    torch.testing.assert_close(sine.double(), torch.cat((angles.sin(), angles.sin()), -1), atol=5e-4, rtol=0)
    assert cosine.dtype == sine.dtype == torch.float32


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
        LLAMA3,
    ],
)
def test_every_type_equals_transformers(rope: dict[str, Any]) -> None:
    draft_config = config(**rope)
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=32,
            num_attention_heads=2,
            head_dim=16,
            max_position_embeddings=draft_config.max_position_embeddings,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **rope},
        )
    )
    positions = torch.tensor([[0, 3, 200, 1000]])
    cosine, sine = Rope(draft_config)(positions)
    expected_cosine, expected_sine = theirs(torch.zeros(1, 4, 32), positions)
    assert torch.equal(cosine, expected_cosine)
    assert torch.equal(sine, expected_sine)
    if rope:
        assert not torch.equal(cosine, Rope(config())(positions)[0])
    states = torch.randn(1, 2, 4, 16, generator=torch.Generator().manual_seed(0))
    turned = rotate(states, cosine[:, None], sine[:, None])
    assert torch.equal(turned, apply_rotary_pos_emb(states, states, expected_cosine, expected_sine)[0])


def test_partial_rotary_leaves_the_other_channels() -> None:
    cosine, sine = Rope(config(partial_rotary_factor=0.5))(torch.tensor([[5, 9]]))
    assert cosine.shape == (1, 2, 8)
    states = torch.randn(1, 3, 2, 16, generator=torch.Generator().manual_seed(1))
    turned = rotate(states, cosine[:, None], sine[:, None])
    assert torch.equal(turned[..., 8:], states[..., 8:])
    assert not torch.allclose(turned[..., :8], states[..., :8])


def test_frequencies_stay_fp32_when_the_module_is_cast() -> None:
    rope = Rope(config())
    positions = torch.tensor([[100_003]])
    before = rope(positions)
    rope.to(torch.bfloat16)
    after = rope(positions)
    assert rope.inv_freq.dtype == torch.float32
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_there_is_no_position_past_which_angles_repeat() -> None:
    draft_config = config()
    last = draft_config.max_position_embeddings
    cosine, _ = Rope(draft_config)(torch.tensor([[last - 1, last, 3 * last]]))
    assert not torch.allclose(cosine[0, 0], cosine[0, 1])
    assert not torch.allclose(cosine[0, 1], cosine[0, 2])
