"""Embeddings of blocks behind an anchor, against their plain reference."""

import pytest
import torch

pytest.importorskip("triton")

from draftsmith.kernels.layers.block_embeddings import block_embeddings, block_embeddings_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("width", "slots"), [(33, 2), (1030, 5)])
def test_block_embeddings(dtype, rows, width, slots):
    weight = torch.randn(71, width, generator=torch.Generator().manual_seed(width + rows)).to(dtype)
    anchors = torch.randint(71, (rows, 2))[:, 0]  # not contiguous, as a column is
    expected = block_embeddings_reference(weight, anchors, 70, slots)
    assert torch.equal(block_embeddings(weight, anchors, 70, slots), expected)
    for row in range(rows):
        assert torch.equal(expected[row, 0], weight[anchors[row]])
        assert all(torch.equal(expected[row, slot], weight[70]) for slot in range(1, slots))
    assert not torch.equal(block_embeddings(weight, (anchors + 1) % 71, 70, slots), expected)
    assert not torch.equal(block_embeddings(weight, anchors, 69, slots), expected)
