"""What a verify grants becomes the rows' own, and is reported, in one launch."""

import torch
from torch import Tensor

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.kernels.state.report import (
    FINISHED,
    FINISHED_IN_KERNEL,
    HEADER_IN_KERNEL,
    INVALID_DRAFT,
    INVALID_DRAFT_IN_KERNEL,
    INVALID_TARGET,
    INVALID_TARGET_IN_KERNEL,
    REPORT_HEADER,
    STOPPED,
    STOPPED_IN_KERNEL,
)
from draftsmith.kernels.triton import tl, triton


def prefix_length(accepted: Tensor, count: Tensor | None) -> Tensor:
    """Leading True entries of accepted [slots, P], at most count [slots] (None: P) of them: [slots] int64."""
    if count is not None:
        accepted = accepted & (torch.arange(accepted.shape[1], device=accepted.device) < count[:, None])
    return accepted.long().cumprod(-1).sum(-1)


def commit_reference(
    state: DecodingState, token_ids: Tensor, count: Tensor | None, finite: Tensor, proposed: Tensor | None = None
) -> None:
    """Plain PyTorch for `commit`."""
    width = token_ids.shape[1]
    index = torch.arange(width, device=state.length.device)
    state.invalid_target.logical_or_(~finite.all(-1) & ~state.finished)
    if proposed is not None:
        count = prefix_length(token_ids[:, :-1] == proposed, count) + 1
    room = state.limit - state.length if count is None else torch.minimum(count, state.limit - state.length)
    counts = torch.arange(state.stop_ids.shape[1], device=state.length.device) < state.stop_count[:, None]  # [slots, n]
    is_stop_id = ((token_ids.unsqueeze(-1) == state.stop_ids[:, None]) & counts[:, None]).any(-1)
    is_stop = is_stop_id & (index < room[:, None])  # [slots, w]
    before_stop = (is_stop.long().cumsum(-1) == 0).long().sum(-1)  # w when there is none
    committed = torch.minimum(room.clamp(max=width), before_stop + 1).masked_fill(state.finished, 0)
    state.stopped.logical_or_(is_stop.any(-1) & ~state.finished)

    # Whole blocks are written; the length says what counts.
    state.tokens.scatter_(1, state.length[:, None] + index, token_ids)
    state.length.add_(committed)
    invalid = state.invalid_target | state.invalid_draft
    state.finished.logical_or_(state.stopped | (state.length >= state.limit) | invalid)
    flags = FINISHED * state.finished.long() + STOPPED * state.stopped.long()
    flags = flags + INVALID_TARGET * state.invalid_target.long() + INVALID_DRAFT * state.invalid_draft.long()
    header = torch.stack((state.length, committed, flags), dim=1)
    state.report[:, : REPORT_HEADER + width].copy_(torch.cat((header, token_ids), dim=1))


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
    flags = FINISHED_IN_KERNEL * finished + STOPPED_IN_KERNEL * stopped
    flags += INVALID_TARGET_IN_KERNEL * invalid_target + INVALID_DRAFT_IN_KERNEL * invalid_draft
    tl.store(report + 2, flags.to(tl.int64))
    tl.store(report + HEADER_IN_KERNEL + index, ids, mask=inside)


def commit(
    state: DecodingState, token_ids: Tensor, count: Tensor | None, finite: Tensor, proposed: Tensor | None = None
) -> None:
    """Appends what a verify grants to each row: at most up to the first of its stop ids (kept) and to its limit,
    nothing to finished rows; sets the flags; and reports it.

    token_ids [slots, w] int64. Without `proposed`: the first count [slots] of them are granted (None: all). With
    proposed [slots, w - 1], token_ids are what was chosen at each position: granted are those that follow only
    proposals that were chosen as well, of which only the first count [slots] were proposed at all (None: all). finite
    [slots, w] bool: whether the numbers behind each token were; a row where they were not is marked and ends.
    """
    if not uses_kernels(token_ids):
        commit_reference(state, token_ids, count, finite, proposed)
        return
    width = token_ids.shape[1]
    _commit_kernel[(len(state.length),)](
        token_ids.contiguous(), token_ids if proposed is None else proposed.contiguous(),
        state.length if count is None else count, finite.contiguous(), state.tokens, state.length, state.limit,
        state.finished, state.stopped, state.stop_ids, state.stop_count, state.invalid_target, state.invalid_draft,
        state.report, state.tokens.stride(0), state.stop_ids.stride(0), state.report.stride(0),
        WIDTH=width, SPAN=triton.next_power_of_2(width), STOPS=state.stop_ids.shape[1],
        HAS_PROPOSED=proposed is not None, HAS_COUNT=count is not None, num_warps=1,
    )  # fmt: skip
