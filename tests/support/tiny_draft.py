"""Small drafts with random weights, large enough in scale that every part of the network shows in the output."""

from typing import Any

import torch

from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft


def tiny_draft(
    target: Any,
    *,
    num_layers: int = 2,
    block_size: int = 7,
    num_taps: int = 2,
    layer_types: tuple[str, ...] | None = None,
    sliding_window: int | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Draft:
    """An fp32 draft for `target` (needs hidden_size, num_layers, vocab_size): the mask token is the last id, the taps
    are the first `num_taps` layers in falling order (so that a mixed-up order shows). `overrides` are further
    `DraftConfig` fields."""
    fields: dict[str, Any] = {
        "architecture": "dflash",
        "hidden_size": target.hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 2 * target.hidden_size + 8,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": 512,
        "rope": {"rope_theta": 5000.0},
        "layer_types": layer_types or ("full_attention",) * num_layers,
        "sliding_window": sliding_window,
        "dtype": "float32",
        "block_size": block_size,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": tuple(reversed(range(num_taps))),
        "num_target_layers": target.num_layers,
    }
    draft = Draft.from_config(DraftConfig(**{**fields, **overrides}))
    scramble(draft, seed)
    return draft.eval()


def scramble(draft: Draft, seed: int) -> None:
    """Draws every parameter anew: matrices with unit gain, vectors (norms, sinks) around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            scaled = noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1.0 + 0.3 * noise
            parameter.copy_(scaled)


def dspark_head(
    kind: str = "vanilla", confidence: bool = True, with_markov: bool = True, rank: int = 3
) -> dict[str, Any]:
    """DSpark's head as a draft's configuration names it."""
    return {
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": with_markov,
    }
