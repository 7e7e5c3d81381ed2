"""The keys of a block's tokens: set up before the first step, and read as tokens after the last, in a launch each."""

import torch
from torch import Tensor

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.triton import tl, triton
from draftsmith.kernels.vocabulary.keys import LOWEST_KEY_IN_KERNEL, key_ids, key_ids_in_kernel, new_keys, token_keys

BLOCK = 256


def begin_keys_reference(anchor_ids: Tensor, steps: int) -> Tensor:
    """Plain PyTorch for `begin_keys`."""
    return torch.cat((token_keys(anchor_ids)[None], new_keys(steps, len(anchor_ids), device=anchor_ids.device)))


def block_tokens_reference(keys: Tensor) -> Tensor:
    """Plain PyTorch for `block_tokens`."""
    return key_ids(keys[1:]).T.contiguous()


@triton.jit
def _begin_kernel(anchor_ptr, keys_ptr, batch, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    anchor = tl.load(anchor_ptr + index, mask=index < batch, other=0)
    key = tl.where(index < batch, 0xFFFFFFFF - anchor, LOWEST_KEY_IN_KERNEL)
    tl.store(keys_ptr + index, key, mask=index < total)


@triton.jit
def _tokens_kernel(keys_ptr, out_ptr, batch, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = index < batch * steps
    keys = tl.load(keys_ptr + (index % steps + 1) * batch + index // steps, mask=ok, other=0)
    tl.store(out_ptr + index, key_ids_in_kernel(keys), mask=ok)


def begin_keys(anchor_ids: Tensor, steps: int) -> Tensor:
    """anchor_ids [batch] int64 -> keys [steps + 1, batch] int64: the anchors', then keys below every token's."""
    if not uses_kernels(anchor_ids):
        return begin_keys_reference(anchor_ids, steps)
    batch = len(anchor_ids)
    anchors, total = anchor_ids.contiguous(), (steps + 1) * batch
    keys = torch.empty(steps + 1, batch, dtype=torch.int64, device=anchor_ids.device)
    _begin_kernel[(triton.cdiv(total, BLOCK),)](anchors, keys, batch, total, BLOCK=BLOCK)
    return keys


def block_tokens(keys: Tensor) -> Tensor:
    """keys [steps + 1, batch] int64, contiguous -> the steps' tokens [batch, steps] int64."""
    if not uses_kernels(keys):
        return block_tokens_reference(keys)
    steps, batch = keys.shape[0] - 1, keys.shape[1]
    tokens = torch.empty(batch, steps, dtype=torch.int64, device=keys.device)
    _tokens_kernel[(triton.cdiv(batch * steps, BLOCK),)](keys, tokens, batch, steps, BLOCK=BLOCK)
    return tokens
