"""z-lab's own package and draftsmith read each other's directories and compute the same numbers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafts.attention import DenseBlockAttention
from draftsmith.drafts.draft import Draft
from tests.support.tiny_draft import scramble, tiny_draft

zlab = pytest.importorskip("dflash.model", reason="needs the extra [interop]")
pytestmark = pytest.mark.interop

TARGET = SimpleNamespace(hidden_size=32, num_layers=6, vocab_size=97)
FULL, SLIDING = "full_attention", "sliding_attention"
VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_layers": 1, "num_taps": 1, "block_size": 2},
    {"num_layers": 3, "num_taps": 5, "block_size": 16, "layer_types": (SLIDING, FULL, SLIDING), "sliding_window": 5},
    {"layer_types": (SLIDING, SLIDING), "sliding_window": 3, "causal": False},
    {"causal": True, "num_key_value_heads": 4},
    {"rope": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
]


def inputs(draft: Draft, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """(features [1, S, T*H], embeddings [1, B, H])."""
    g = torch.Generator().manual_seed(seed)
    config = draft.config
    features = torch.randn(1, context, len(config.target_layer_ids) * config.hidden_size, generator=g)
    return features, torch.randn(1, config.block.size, config.hidden_size, generator=g)


@torch.no_grad()
def ours(draft: Draft, features: Tensor, embeddings: Tensor) -> Tensor:
    context, size = features.shape[1], draft.config.block.size
    position = torch.arange(context + size)
    away = position[context:, None] - position
    masks = {}
    for kind in set(draft.attention_kinds):
        mask = torch.ones(size, context + size, dtype=torch.bool)
        if kind.causal:
            mask &= away >= 0
        if kind.window is not None:
            mask &= away.abs() < kind.window
        masks[kind] = mask[None, None]
    keys_values = draft.context_keys_values(features, position[None, :context])
    hidden = draft(embeddings[:, None], position[None, None, context:], keys_values, DenseBlockAttention(masks))
    return hidden[:, 0]


@torch.no_grad()
def theirs(model: Any, features: Tensor, embeddings: Tensor) -> Tensor:
    positions = torch.arange(features.shape[1] + embeddings.shape[1])[None]
    return model.eval()(position_ids=positions, noise_embedding=embeddings, target_hidden=features)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_their_package_loads_ours_and_agrees(tmp_path: Path, options: dict[str, Any]) -> None:
    draft = tiny_draft(TARGET, seed=3, **options)
    draft.save(tmp_path / "draft")
    model = zlab.DFlashDraftModel.from_pretrained(tmp_path / "draft")
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name.split(".", 1)[1]: p.shape for name, p in draft.named_parameters()
    }
    assert model.block_size == draft.config.block.size
    assert model.mask_token_id == draft.config.block.mask_token_id
    assert tuple(model.target_layer_ids) == draft.config.target_layer_ids
    features, embeddings = inputs(draft, context=11, seed=len(options))
    expected = theirs(model, features, embeddings)
    torch.testing.assert_close(ours(draft, features, embeddings), expected, atol=1e-5, rtol=1e-5)
    features[0, -1] += 1.0
    assert not torch.allclose(ours(draft, features, embeddings), expected, atol=1e-3)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_we_load_theirs_and_agree(tmp_path: Path, options: dict[str, Any]) -> None:
    start = tiny_draft(TARGET, seed=4, **options)
    start.save(tmp_path / "start")
    model = zlab.DFlashDraftModel.from_pretrained(tmp_path / "start")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    model.save_pretrained(tmp_path / "theirs")
    draft = Draft.load(tmp_path / "theirs", strict=True)
    assert draft.config == start.config
    features, embeddings = inputs(draft, context=7, seed=5)
    expected = theirs(model, features, embeddings)
    torch.testing.assert_close(ours(draft, features, embeddings), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours(start, features, embeddings), expected, atol=1e-3)


def test_logits_agree_with_multiplier_and_softcap(tmp_path: Path) -> None:
    from draftsmith.targets.ends import TargetEnds

    draft = tiny_draft(TARGET, output_multiplier=0.3, final_logit_softcapping=2.5)
    draft.save(tmp_path / "draft")
    model = zlab.DFlashDraftModel.from_pretrained(tmp_path / "draft")
    g = torch.Generator().manual_seed(1)
    head, hidden = torch.nn.Linear(32, 97, bias=False), torch.randn(2, 3, 32, generator=g)
    with torch.no_grad():
        expected = model.compute_logits(hidden, head)
        torch.testing.assert_close(draft.logits(hidden, TargetEnds(head.weight, head.weight)), expected)


def test_numbers_in_bfloat16_are_theirs_to_rounding(tmp_path: Path) -> None:
    draft = tiny_draft(TARGET, dtype="bfloat16")
    scramble(draft, 8)
    draft.save(tmp_path / "draft")
    loaded = Draft.load(tmp_path / "draft")
    model = zlab.DFlashDraftModel.from_pretrained(tmp_path / "draft", dtype="auto")
    assert model.dtype == loaded.dtype == torch.bfloat16
    features, embeddings = (x.bfloat16() for x in inputs(draft, context=6, seed=2))
    torch.testing.assert_close(
        ours(loaded, features, embeddings), theirs(model, features, embeddings), atol=0.06, rtol=0.05
    )
