"""A draft's pass in decoding by kernels against the pass by its own modules, for all that a layer may have; on a GPU
`tests/gpu/test_engine_step.py` does the same with every kind of draft."""

from copy import deepcopy
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from draftsmith.drafts.convolution import BlockConvolution
from draftsmith.drafts.runner import DenseBlocks, FusedBlocks
from draftsmith.kernels.device import interpreted
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

HEAD = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 4}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # fp16: products come as addends
def test_a_block_by_kernels_is_that_of_the_modules(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    target = tiny_target("llama", vocab_size=61)
    options: dict[str, Any] = {
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "head": HEAD,
    }
    draft = tiny_draft(target, block_size=4, architecture="dflash2", **options).to(dtype)
    embeddings, anchors = torch.randn(1, 4, target.hidden_size).to(dtype), torch.tensor([3])
    taps = torch.randn(1, 3, draft.backbone.fc.weight.shape[1]).to(dtype)
    dense = _block(DenseBlocks(draft), taps, embeddings, anchors)
    plain = _block(FusedBlocks(draft), taps, embeddings, anchors)
    with interpreted():
        fused = _block(FusedBlocks(draft), taps, embeddings, anchors)
    torch.testing.assert_close(fused, plain, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=1e-4)
    assert not torch.equal(fused, plain), "the kernels ran"
    if dtype == torch.float32:
        torch.testing.assert_close(fused, dense, atol=1e-4, rtol=1e-4)
    else:  # rounds no more than the modules do
        exact = _block(DenseBlocks(deepcopy(draft).float()), taps.float(), embeddings.float(), anchors)
        of_fused, of_dense = ((found - exact).norm() for found in (fused, dense))
        assert 0.0 < of_fused < 1.25 * of_dense
    convolution = cast(BlockConvolution, draft.backbone.layers[0].mlp_conv)
    convolution.base_kernel[1, 2, 7] += 4.0  # after the second sublayer, from two slots before
    with interpreted():
        changed = (_block(FusedBlocks(draft), taps, embeddings, anchors) - fused).abs().amax(-1)
    assert (changed[0] > 0.1).tolist() == [False, False, True, True]


def _block(
    blocks: DenseBlocks | FusedBlocks, taps: torch.Tensor, embeddings: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    cache = blocks.new_cache(1, 8)
    blocks.append(taps, torch.zeros_like(anchors), cache)
    return blocks.block(embeddings, anchors, cache, 8)
