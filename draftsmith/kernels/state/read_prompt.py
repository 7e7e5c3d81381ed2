"""The next part of every row's prompt, in one launch."""

import torch
from torch import Tensor

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.kernels.triton import tl, triton

BLOCK = 512


def read_prompt_reference(state: DecodingState, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch for `read_prompt`."""
    positions = state.read[:, None] + torch.arange(width, device=state.read.device)
    return state.tokens.gather(1, positions), positions, (state.length - state.read).clamp(max=width)


@triton.jit(do_not_specialize=["width"])  # one program for prompts of any length
def _read_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, length_ptr, read_ptr, ids_ptr, positions_ptr, valid_ptr, tokens_stride, width, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    first = tl.load(read_ptr + slot)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < width
    ids = tl.load(tokens_ptr + slot * tokens_stride + first + index, mask=inside, other=0)
    tl.store(ids_ptr + slot * width + index, ids, mask=inside)
    tl.store(positions_ptr + slot * width + index, first + index, mask=inside)
    tl.store(valid_ptr + slot, tl.minimum(tl.load(length_ptr + slot) - first, width))


def read_prompt(state: DecodingState, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The next `width` tokens of each prompt: ids and positions, both [slots, width] int64, and how many of them are
    the prompt's own [slots] int64; the rest is padding."""
    if not uses_kernels(state.length):
        return read_prompt_reference(state, width)
    slots = len(state.length)
    ids, positions = state.length.new_empty(slots, width), state.length.new_empty(slots, width)
    valid = torch.empty_like(state.length, memory_format=torch.contiguous_format)
    _read_kernel[(slots, triton.cdiv(width, BLOCK))](
        state.tokens, state.length, state.read, ids, positions, valid, state.tokens.stride(0), width,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return ids, positions, valid
