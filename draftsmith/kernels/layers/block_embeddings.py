"""Embeddings of blocks of which only the anchor is known: in one launch, without writing the blocks' ids."""

import torch
from torch import Tensor
from torch.nn import functional


def block_embeddings_reference(weight: Tensor, anchor_ids: Tensor, filler: int, block_size: int) -> Tensor:
    """Plain PyTorch for `block_embeddings`; same arguments, same result."""
    fillers = anchor_ids.new_full((len(anchor_ids), block_size - 1), filler)
    return functional.embedding(torch.cat((anchor_ids[:, None], fillers), dim=1), weight)


def block_embeddings(weight: Tensor, anchor_ids: Tensor, filler: int, block_size: int) -> Tensor:
    """Rows of weight [V, H], which is contiguous: of each anchor id, then of `filler`, over and over.

    anchor_ids [n] int64 -> [n, block_size, H] in weight's dtype.
    """
    run = block_embeddings_reference
    if weight.is_cuda:
        from draftsmith.kernels.layers.block_embeddings_triton import block_embeddings as run
    return run(weight, anchor_ids, filler, block_size)
