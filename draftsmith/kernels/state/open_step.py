"""What a step begins with, of all slots in one launch."""

import torch
from torch import Tensor

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.kernels.triton import tl, triton


def open_step_reference(
    state: DecodingState, *, width: int, own: int, num_ids: int, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plain PyTorch for `open_step`."""
    length = state.length
    anchor = length - 1
    first = torch.arange(num_ids, device=length.device) == 0
    ids = torch.where(first, state.tokens.gather(1, anchor[:, None]), 0)
    positions = (anchor[:, None] + torch.arange(width, device=length.device)).clamp(max=window - 1)
    valid = (window - anchor).clamp(max=own).masked_fill(state.finished, 0)
    return anchor, ids, positions, valid


@triton.jit
def _open_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, length_ptr, finished_ptr, anchor_ptr, ids_ptr, positions_ptr, valid_ptr, tokens_stride, window,
    WIDTH: tl.constexpr, OWN: tl.constexpr, IDS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    anchor = tl.load(length_ptr + slot) - 1
    index = tl.arange(0, SPAN)
    anchor_id = tl.load(tokens_ptr + slot * tokens_stride + anchor)
    tl.store(anchor_ptr + slot, anchor)
    ids = tl.where(index == 0, anchor_id, 0)
    tl.store(ids_ptr + slot * IDS + index, ids, mask=index < IDS)
    positions = tl.minimum(anchor + index, window - 1)
    tl.store(positions_ptr + slot * WIDTH + index, positions, mask=index < WIDTH)
    finished = tl.load(finished_ptr + slot).to(tl.int32)
    tl.store(valid_ptr + slot, tl.where(finished > 0, 0, tl.minimum(window - anchor, OWN)))


def open_step(
    state: DecodingState, *, width: int, own: int, num_ids: int, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a step begins with, all int64: anchors [slots], the positions of the last tokens; ids [slots, num_ids], the
    last token and then zeros; the positions of the verify [slots, width], from the anchor on, all below `window`; and
    how many of its tokens are a row's own [slots]: at most `own`, none past the window, and 0 in finished rows.

    A token at the last position of the target's window decides nothing any more, so positions past it are clamped to
    it, and their tokens are not the row's own. Several tokens may then fall on that one position; whichever of them its
    cache entries come from, no query that counts sees them.
    """
    if not uses_kernels(state.length):
        return open_step_reference(state, width=width, own=own, num_ids=num_ids, window=window)
    tokens, length = state.tokens, state.length
    slots = len(length)
    anchor, valid = (torch.empty_like(length, memory_format=torch.contiguous_format) for _ in range(2))
    ids, positions = length.new_empty(slots, num_ids), length.new_empty(slots, width)
    _open_kernel[(slots,)](
        tokens, length, state.finished, anchor, ids, positions, valid, tokens.stride(0), window,
        WIDTH=width, OWN=own, IDS=num_ids, SPAN=triton.next_power_of_2(max(width, num_ids)), num_warps=1,
    )  # fmt: skip
    return anchor, ids, positions, valid
