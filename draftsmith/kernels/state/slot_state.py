"""What a decoding step does to the numbers that it keeps of each row, in one launch each instead of dozens.

The functions change tensors in place: tokens [slots, length] int64; length, limit, stop_count [slots] int64; finished,
stopped, invalid_target, invalid_draft [slots] bool; stop_ids [slots, n] int64; report [slots, 3 + width] int64. What
they mean is said where they are kept (`draftsmith.decoding.state`). Plain PyTorch is here, and needs no Triton; the
kernels are in `slot_state_triton`, and used on a CUDA device.
"""

import struct
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

REPORT_HEADER = 3
"""Numbers of a report before its tokens: the row's length, how many tokens were committed, and the flags."""

COMMITTED = 1
"""Which of them is the number of tokens committed."""

FINISHED, STOPPED, INVALID_TARGET, INVALID_DRAFT = 1, 2, 4, 8
"""Flags of a report, added up."""

PACKED_HEADER = 7
"""Numbers of a packed row before its stop ids: prompt length, limit, seed, stop ids that count, top_k, temperature and
top_p."""


def pack_rows(
    numbers: Sequence[tuple[int, int, int, int, int, float, float]],
    stop_ids: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
) -> Tensor:
    """What `place_rows` reads of rows that come in: [rows, PACKED_HEADER + stops + longest prompt] int64 on the host.

    numbers: the header of each row; its temperature is stored as the bits of fp32, its top_p of fp64. Stop ids
    and prompts are padded with zeros to the longest.
    """
    stops, longest = max(len(row) for row in stop_ids), max(len(row) for row in prompts)
    # An array is read at once; a list is looked at number by number.
    packed = array("q")
    for (*header, temperature, top_p), stop, prompt in zip(numbers, stop_ids, prompts, strict=True):
        packed.extend(header)
        packed.frombytes(struct.pack("=fid", temperature, 0, top_p))
        packed.extend((*stop, *[0] * (stops - len(stop))))
        packed.extend(prompt)
        packed.extend([0] * (longest - len(prompt)))
    return torch.frombuffer(packed, dtype=torch.int64).view(len(prompts), -1)


def place_rows_reference(
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
    """Plain PyTorch for `place_rows`."""
    slots = slice(first, first + len(packed))
    for column, numbers in enumerate((length, limit, seeds, stop_count, top_k)):
        numbers[slots] = packed[:, column]
    temperature[slots] = packed[:, 5].int().view(torch.float32)
    top_p[slots] = packed[:, 6].contiguous().view(torch.float64)
    stop_ids[slots, :stops] = packed[:, PACKED_HEADER : PACKED_HEADER + stops]
    prompts = packed[:, PACKED_HEADER + stops :]
    tokens[slots, : prompts.shape[1]] = prompts
    read[slots] = 0
    for flags in (stopped, invalid_target, invalid_draft):
        flags[slots] = False
    finished[slots] = True


def place_rows(packed: Tensor, first: int, stops: int, **state: Tensor) -> None:
    """Writes rows that come in over the former ones of the slots from `first` on, as they are before their prompts are
    read.

    packed [rows, ...] int64: `pack_rows` on the slots' device, of rows with `stops` stop ids, padding included.
    `state`: the other tensors, of all slots, by their names in `place_rows_reference`; temperature [slots] fp32, top_p
    [slots] fp64, read, seeds, top_k [slots] int64.
    """
    run = place_rows_reference
    if packed.is_cuda:
        from draftsmith.kernels.state.slot_state_triton import place_rows as run
    run(packed, first, stops, **state)


def read_prompt_reference(tokens: Tensor, length: Tensor, read: Tensor, *, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch for `read_prompt`."""
    positions = read[:, None] + torch.arange(width, device=read.device)
    return tokens.gather(1, positions), positions, (length - read).clamp(max=width)


def read_prompt(tokens: Tensor, length: Tensor, read: Tensor, *, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The next `width` tokens of each row: ids and positions [slots, width], from read [slots] on, and how many of them
    are the row's own [slots] (all lie below its length). All int64."""
    run = read_prompt_reference
    if length.is_cuda:
        from draftsmith.kernels.state.slot_state_triton import read_prompt as run
    return run(tokens, length, read, width=width)


def open_step_reference(
    tokens: Tensor, length: Tensor, finished: Tensor, *, width: int, own: int, block: int, filler: int, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plain PyTorch for `open_step`."""
    anchor = length - 1
    anchor_ids = tokens.gather(1, anchor[:, None])  # [slots, 1]
    first = torch.arange(block, device=length.device) == 0
    ids = torch.where(first, anchor_ids, filler)
    positions = (anchor[:, None] + torch.arange(width, device=length.device)).clamp(max=window - 1)
    valid = (window - anchor).clamp(max=own).masked_fill(finished, 0)
    return anchor, ids, positions, valid


def open_step(
    tokens: Tensor, length: Tensor, finished: Tensor, *, width: int, own: int, block: int, filler: int, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a step begins with: each row's anchor, the position of its last token [slots]; the ids of its block
    [slots, block], the last token and then `filler`; the positions of its verify [slots, width], from the anchor on,
    none of them past window - 1; and how many of the verify's tokens are the row's own [slots]: `own`, but none past
    the window, and 0 in finished rows. All int64."""
    run = open_step_reference
    if length.is_cuda:
        from draftsmith.kernels.state.slot_state_triton import open_step as run
    return run(tokens, length, finished, width=width, own=own, block=block, filler=filler, window=window)


def mark_not_finite_reference(states: Tensor, finished: Tensor, invalid: Tensor) -> None:
    """Plain PyTorch for `mark_not_finite`."""
    invalid.logical_or_(~states.isfinite().flatten(1).all(-1) & ~finished)


def mark_not_finite(states: Tensor, finished: Tensor, invalid: Tensor) -> None:
    """Sets `invalid` for rows with a NaN or an infinity in states [slots, ...], unless they are finished."""
    run = mark_not_finite_reference
    if states.is_cuda:
        from draftsmith.kernels.state.slot_state_triton import mark_not_finite as run
    run(states, finished, invalid)


def prefix_length(accepted: Tensor, count: Tensor | None) -> Tensor:
    """Leading True entries of accepted [slots, P], at most count [slots] (None: P) of them: [slots] int64."""
    if count is not None:
        accepted = accepted & (torch.arange(accepted.shape[1], device=accepted.device) < count[:, None])
    return accepted.long().cumprod(-1).sum(-1)


def commit_reference(
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
    """Plain PyTorch for `commit`."""
    width = token_ids.shape[1]
    index = torch.arange(width, device=length.device)
    invalid_target.logical_or_(~finite.all(-1) & ~finished)
    if proposed is not None:
        count = prefix_length(token_ids[:, :-1] == proposed, count) + 1
    room = limit - length if count is None else torch.minimum(count, limit - length)
    counts = torch.arange(stop_ids.shape[1], device=length.device) < stop_count[:, None]  # [slots, n]
    is_stop_id = ((token_ids.unsqueeze(-1) == stop_ids[:, None]) & counts[:, None]).any(-1)
    is_stop = is_stop_id & (index < room[:, None])  # [slots, w]
    before_stop = (is_stop.long().cumsum(-1) == 0).long().sum(-1)  # w when there is none
    committed = torch.minimum(room.clamp(max=width), before_stop + 1).masked_fill(finished, 0)
    stopped.logical_or_(is_stop.any(-1) & ~finished)

    # Whole blocks are written; the length says what counts.
    tokens.scatter_(1, length[:, None] + index, token_ids)
    length.add_(committed)
    finished.logical_or_(stopped | (length >= limit) | invalid_target | invalid_draft)
    flags = FINISHED * finished.long() + STOPPED * stopped.long()
    flags = flags + INVALID_TARGET * invalid_target.long() + INVALID_DRAFT * invalid_draft.long()
    header = torch.stack((length, committed, flags), dim=1)
    report[:, : REPORT_HEADER + width].copy_(torch.cat((header, token_ids), dim=1))


def commit(token_ids: Tensor, count: Tensor | None, proposed: Tensor | None, finite: Tensor, **state: Tensor) -> None:
    """Appends what a verify grants to each row: at most up to the first of its stop ids (kept) and to its limit,
    nothing to finished rows; sets the flags; and reports it.

    token_ids [slots, w] int64. Without `proposed`: the first count [slots] of them are granted (None: all). With
    proposed [slots, w - 1], token_ids are what was chosen at each position: granted are those that follow only
    proposals that were chosen as well, of which only the first count [slots] were proposed at all (None: all). finite
    [slots, w] bool: whether the numbers behind each token were; a row where they were not is marked and ends.
    `state`: the other tensors, by their names in `commit_reference`.
    """
    run = commit_reference
    if token_ids.is_cuda:
        from draftsmith.kernels.state.slot_state_triton import commit as run
    run(token_ids, count, proposed, finite, **state)
