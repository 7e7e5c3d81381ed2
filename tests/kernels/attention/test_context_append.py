"""The draft's context append against plain PyTorch, and the draft's fused pass against its own modules."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from draftsmith.drafts.runner import DenseBlocks, FusedBlocks
from draftsmith.kernels.attention.context_append import context_append, context_append_reference
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("dim", "rotary", "kv_heads"), [(64, 64, 2), (96, 64, 3)])
def test_context_append(dtype: torch.dtype, dim: int, rotary: int, kv_heads: int) -> None:
    layers, batch, width, length = 2, 3, 4, 20
    fresh = torch.randn(batch, width, layers * 2 * kv_heads * dim).to(DEVICE, dtype)
    weights = torch.randn(layers, dim).to(DEVICE, dtype)
    angles = torch.rand(length, rotary // 2).repeat(1, 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    start = torch.tensor([0, 16, 7], device=DEVICE)
    empty = torch.full((layers, 2, batch, kv_heads, length, dim), 7.0).to(DEVICE, dtype)
    found, expected, changed = empty.clone(), empty.clone(), empty.clone()
    context_append(fresh, weights, table, start, found, eps=1e-6)
    context_append_reference(fresh, weights, table, start, expected, eps=1e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert (found[:, :, 0, :, 4:] == 7.0).all()
    context_append(fresh, weights, table, start - (start > 0).long(), changed, eps=1e-6)
    assert not torch.equal(changed[:, 0, 1, :, 16:19], found[:, 0, 1, :, 16:19])


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 1},
        {  # causal in the block, and not
            **{"num_layers": 2, "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
            **{"attention_sinks": True, "input_embedding_scale": 2.0},
        },
    ],
)
def test_the_fused_pass_equals_the_drafts_own_modules(options: dict[str, Any]) -> None:
    target = tiny_target("qwen3")
    draft = tiny_draft(target, block_size=3, **options).to(DEVICE)
    taps = torch.randn(2, 6, 2 * target.hidden_size, device=DEVICE)
    start = torch.tensor([0, 3], device=DEVICE)
    embeddings = torch.randn(2, 3, target.hidden_size, device=DEVICE)
    results = []
    with torch.no_grad():
        for blocks in (DenseBlocks(draft), FusedBlocks(draft)):
            cache = blocks.new_cache(2, 16)
            blocks.append(taps, torch.zeros_like(start), cache)
            blocks.append(taps, start, cache)
            kept = cache.joint.clone()
            results.append((kept, blocks.block(embeddings, start + 5, cache, 12)))
    for dense, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, dense, atol=1e-4, rtol=1e-4)
