"""Embeddings of blocks of which only the anchor is known: in one launch, without writing the blocks' ids.

A program copies a part of one slot's row. Launched as any other kernel: what follows it may fetch weights early
(`device.overlapping`) because a step begins so.
"""

import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.triton import tl, triton

CHANNELS = 1024
"""Of one slot, in one program."""


def block_embeddings_reference(weight: Tensor, anchor_ids: Tensor, filler: int, block_size: int) -> Tensor:
    """Plain PyTorch for `block_embeddings`; same arguments, same result."""
    fillers = anchor_ids.new_full((len(anchor_ids), block_size - 1), filler)
    return functional.embedding(torch.cat((anchor_ids[:, None], fillers), dim=1), weight)


@triton.jit(do_not_specialize=["filler"])
def _embeddings_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, anchor_ids_ptr, out_ptr, anchor_stride, filler,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < WIDTH
    anchor_id = tl.load(anchor_ids_ptr + row // SLOTS * anchor_stride)
    token = tl.where(row % SLOTS == 0, anchor_id, filler)
    values = tl.load(weight_ptr + token * WIDTH + channels, mask=inside)
    tl.store(out_ptr + row * WIDTH + channels, values, mask=inside)


def block_embeddings(weight: Tensor, anchor_ids: Tensor, filler: int, block_size: int) -> Tensor:
    """Rows of weight [V, H], which is contiguous: of each anchor id, then of `filler`, over and over.

    anchor_ids [n] int64 -> [n, block_size, H] in weight's dtype.
    """
    if not uses_kernels(weight):
        return block_embeddings_reference(weight, anchor_ids, filler, block_size)
    width = weight.shape[1]
    out = weight.new_empty(len(anchor_ids), block_size, width)
    block = min(CHANNELS, triton.next_power_of_2(width))
    _embeddings_kernel[(len(anchor_ids) * block_size, triton.cdiv(width, block))](
        weight, anchor_ids, out, anchor_ids.stride(0), filler,
        SLOTS=block_size, WIDTH=width, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return out
