"""Rows whose draft went wrong: found in one launch."""

from torch import Tensor

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.kernels.triton import tl, triton


def mark_not_finite_reference(state: DecodingState, states: Tensor) -> None:
    """Plain PyTorch for `mark_not_finite`."""
    state.invalid_draft.logical_or_(~states.isfinite().flatten(1).all(-1) & ~state.finished)


@triton.jit
def _finite_kernel(states_ptr, finished_ptr, invalid_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    slot = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(states_ptr + slot * size + index, mask=index < size, other=0.0).to(tl.float32)
    # Infinity and NaN are the numbers whose product with zero is not zero.
    bad = tl.max((values * 0.0 != 0.0).to(tl.int32), 0)
    finished = tl.load(finished_ptr + slot).to(tl.int32)
    tl.store(invalid_ptr + slot, True, mask=(bad > 0) & (finished == 0))


def mark_not_finite(state: DecodingState, states: Tensor) -> None:
    """Sets `state.invalid_draft` for rows with a NaN or an infinity in the draft's states [slots, ...], unless they are
    finished."""
    if not uses_kernels(states):
        mark_not_finite_reference(state, states)
        return
    rows = states.reshape(len(states), -1).contiguous()
    block = 4096
    _finite_kernel[(len(rows), triton.cdiv(rows.shape[1], block))](
        rows, state.finished, state.invalid_draft, rows.shape[1], BLOCK=block, num_warps=4
    )
