"""The kernels of `slot_state`: one program a row."""

import torch
from torch import Tensor

from draftsmith.kernels.state import slot_state
from draftsmith.kernels.triton import tl, triton

# The layout of a report, as kernels can read it.
_HEADER = tl.constexpr(slot_state.REPORT_HEADER)
_FINISHED, _STOPPED = tl.constexpr(slot_state.FINISHED), tl.constexpr(slot_state.STOPPED)
_INVALID_TARGET, _INVALID_DRAFT = tl.constexpr(slot_state.INVALID_TARGET), tl.constexpr(slot_state.INVALID_DRAFT)


@triton.jit(do_not_specialize=["first", "stops", "longest"])
def _place_kernel(  # type: ignore[no-untyped-def]
    packed_ptr, tokens_ptr, length_ptr, limit_ptr, finished_ptr, stopped_ptr, read_ptr, seeds_ptr, stop_ids_ptr,
    stop_count_ptr, temperature_ptr, top_k_ptr, top_p_ptr, invalid_target_ptr, invalid_draft_ptr,
    packed_stride, tokens_stride, stop_stride, first, stops, longest, HEADER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = first + row
    packed = packed_ptr + row * packed_stride
    tl.store(length_ptr + slot, tl.load(packed))
    tl.store(limit_ptr + slot, tl.load(packed + 1))
    tl.store(seeds_ptr + slot, tl.load(packed + 2))
    tl.store(stop_count_ptr + slot, tl.load(packed + 3))
    tl.store(top_k_ptr + slot, tl.load(packed + 4))
    tl.store(temperature_ptr + slot, tl.load(packed + 5).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(top_p_ptr + slot, tl.load(packed + 6).to(tl.float64, bitcast=True))
    tl.store(read_ptr + slot, 0)
    tl.store(finished_ptr + slot, True)
    tl.store(stopped_ptr + slot, False)
    tl.store(invalid_target_ptr + slot, False)
    tl.store(invalid_draft_ptr + slot, False)
    for begin in range(0, stops, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        ids = tl.load(packed + HEADER + index, mask=index < stops)
        tl.store(stop_ids_ptr + slot * stop_stride + index, ids, mask=index < stops)
    for begin in range(0, longest, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        ids = tl.load(packed + HEADER + stops + index, mask=index < longest)
        tl.store(tokens_ptr + slot * tokens_stride + index, ids, mask=index < longest)


def place_rows(
    packed: Tensor,
    first: int,
    stops: int,
    *,
    tokens: Tensor,
    length: Tensor,
    limit: Tensor,
    finished: Tensor,
    stopped: Tensor,
    read: Tensor,
    seeds: Tensor,
    stop_ids: Tensor,
    stop_count: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    invalid_target: Tensor,
    invalid_draft: Tensor,
) -> None:
    """As `slot_state.place_rows`."""
    _place_kernel[(len(packed),)](
        packed, tokens, length, limit, finished, stopped, read, seeds, stop_ids, stop_count, temperature, top_k, top_p,
        invalid_target, invalid_draft, packed.stride(0), tokens.stride(0), stop_ids.stride(0), first, stops,
        packed.shape[1] - slot_state.PACKED_HEADER - stops, HEADER=slot_state.PACKED_HEADER, BLOCK=1024, num_warps=4,
    )  # fmt: skip


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


def read_prompt(tokens: Tensor, length: Tensor, read: Tensor, *, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `slot_state.read_prompt`."""
    slots, block = len(length), 512
    ids, positions = length.new_empty(slots, width), length.new_empty(slots, width)
    valid = torch.empty_like(length, memory_format=torch.contiguous_format)
    _read_kernel[(slots, triton.cdiv(width, block))](
        tokens, length, read, ids, positions, valid, tokens.stride(0), width, BLOCK=block, num_warps=4
    )
    return ids, positions, valid


@triton.jit
def _open_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr, length_ptr, finished_ptr, anchor_ptr, ids_ptr, positions_ptr, valid_ptr, tokens_stride, filler, window,
    WIDTH: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    anchor = tl.load(length_ptr + slot) - 1
    index = tl.arange(0, SPAN)
    anchor_id = tl.load(tokens_ptr + slot * tokens_stride + anchor)
    tl.store(anchor_ptr + slot, anchor)
    ids = tl.where(index == 0, anchor_id, filler)
    tl.store(ids_ptr + slot * BLOCK + index, ids, mask=index < BLOCK)
    positions = tl.minimum(anchor + index, window - 1)
    tl.store(positions_ptr + slot * WIDTH + index, positions, mask=index < WIDTH)
    finished = tl.load(finished_ptr + slot).to(tl.int32)
    tl.store(valid_ptr + slot, tl.where(finished > 0, 0, tl.minimum(window - anchor, OWN)))


def open_step(
    tokens: Tensor, length: Tensor, finished: Tensor, *, width: int, own: int, block: int, filler: int, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `slot_state.open_step`."""
    slots = len(length)
    anchor, valid = (torch.empty_like(length, memory_format=torch.contiguous_format) for _ in range(2))
    ids, positions = length.new_empty(slots, block), length.new_empty(slots, width)
    _open_kernel[(slots,)](
        tokens, length, finished, anchor, ids, positions, valid, tokens.stride(0), filler, window,
        WIDTH=width, OWN=own, BLOCK=block, SPAN=triton.next_power_of_2(max(width, block)), num_warps=1,
    )  # fmt: skip
    return anchor, ids, positions, valid


@triton.jit
def _finite_kernel(states_ptr, finished_ptr, invalid_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    slot = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(states_ptr + slot * size + index, mask=index < size, other=0.0).to(tl.float32)
    # Infinity and NaN are the numbers whose product with zero is not zero.
    bad = tl.max((values * 0.0 != 0.0).to(tl.int32), 0)
    finished = tl.load(finished_ptr + slot).to(tl.int32)
    tl.store(invalid_ptr + slot, True, mask=(bad > 0) & (finished == 0))


def mark_not_finite(states: Tensor, finished: Tensor, invalid: Tensor) -> None:
    """As `slot_state.mark_not_finite`."""
    rows = states.reshape(len(states), -1).contiguous()
    block = 4096
    _finite_kernel[(len(rows), triton.cdiv(rows.shape[1], block))](
        rows, finished, invalid, rows.shape[1], BLOCK=block, num_warps=4
    )


@triton.jit
def _commit_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, proposed_ptr, count_ptr, finite_ptr, tokens_ptr, length_ptr, limit_ptr, finished_ptr, stopped_ptr,
    stop_ids_ptr, stop_count_ptr, invalid_target_ptr, invalid_draft_ptr, report_ptr,
    tokens_stride, stop_stride, report_stride,
    WIDTH: tl.constexpr, SPAN: tl.constexpr, STOPS: tl.constexpr, HAS_PROPOSED: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SPAN)
    inside = index < WIDTH
    ids = tl.load(ids_ptr + slot * WIDTH + index, mask=inside, other=0)
    length = tl.load(length_ptr + slot)
    limit = tl.load(limit_ptr + slot)
    finished = tl.load(finished_ptr + slot).to(tl.int32)
    stopped = tl.load(stopped_ptr + slot).to(tl.int32)
    invalid_target = tl.load(invalid_target_ptr + slot).to(tl.int32)
    invalid_draft = tl.load(invalid_draft_ptr + slot).to(tl.int32)
    finite = tl.load(finite_ptr + slot * WIDTH + index, mask=inside, other=1).to(tl.int32)
    invalid_target = invalid_target | ((tl.min(finite, 0) == 0) & (finished == 0)).to(tl.int32)
    tl.store(invalid_target_ptr + slot, invalid_target > 0)

    count = tl.full([], WIDTH, tl.int64)
    if HAS_COUNT:
        count = tl.load(count_ptr + slot)
    if HAS_PROPOSED:
        # The first proposal that is not what was chosen, or not proposed at all, is the last token committed.
        offered = index < WIDTH - 1
        proposed = tl.load(proposed_ptr + slot * (WIDTH - 1) + index, mask=offered, other=0)
        wrong = (offered & (proposed != ids)) | (index >= WIDTH - 1)
        if HAS_COUNT:
            wrong = wrong | (index >= count)
        count = tl.min(tl.where(wrong, index, SPAN), 0).to(tl.int64) + 1
    room = tl.minimum(count, limit - length)

    stop_count = tl.load(stop_count_ptr + slot)
    is_stop = tl.zeros([SPAN], tl.int32)
    for number in range(0, STOPS):
        stop_id = tl.load(stop_ids_ptr + slot * stop_stride + number)
        is_stop = is_stop | ((ids == stop_id) & (number < stop_count)).to(tl.int32)
    is_stop = is_stop & (inside & (index < room)).to(tl.int32)
    first_stop = tl.min(tl.where(is_stop > 0, index, SPAN), 0).to(tl.int64)
    committed = tl.where(finished > 0, 0, tl.minimum(room, first_stop + 1))
    stopped = stopped | ((first_stop < SPAN) & (finished == 0)).to(tl.int32)

    tl.store(tokens_ptr + slot * tokens_stride + length + index, ids, mask=inside)
    length = length + committed
    finished = finished | stopped | (length >= limit).to(tl.int32) | invalid_target | invalid_draft
    tl.store(length_ptr + slot, length)
    tl.store(stopped_ptr + slot, stopped > 0)
    tl.store(finished_ptr + slot, finished > 0)
    report = report_ptr + slot * report_stride
    tl.store(report, length)
    tl.store(report + 1, committed)
    flags = _FINISHED * finished + _STOPPED * stopped
    flags += _INVALID_TARGET * invalid_target + _INVALID_DRAFT * invalid_draft
    tl.store(report + 2, flags.to(tl.int64))
    tl.store(report + _HEADER + index, ids, mask=inside)


def commit(
    token_ids: Tensor,
    count: Tensor | None,
    proposed: Tensor | None,
    finite: Tensor,
    *,
    tokens: Tensor,
    length: Tensor,
    limit: Tensor,
    finished: Tensor,
    stopped: Tensor,
    stop_ids: Tensor,
    stop_count: Tensor,
    invalid_target: Tensor,
    invalid_draft: Tensor,
    report: Tensor,
) -> None:
    """As `slot_state.commit`."""
    width = token_ids.shape[1]
    _commit_kernel[(len(length),)](
        token_ids.contiguous(), token_ids if proposed is None else proposed.contiguous(),
        length if count is None else count, finite.contiguous(), tokens, length, limit, finished, stopped, stop_ids,
        stop_count, invalid_target, invalid_draft, report, tokens.stride(0), stop_ids.stride(0), report.stride(0),
        WIDTH=width, SPAN=triton.next_power_of_2(width), STOPS=stop_ids.shape[1],
        HAS_PROPOSED=proposed is not None, HAS_COUNT=count is not None, num_warps=1,
    )  # fmt: skip
