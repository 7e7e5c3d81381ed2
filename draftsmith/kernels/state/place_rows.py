"""Rows that come in: written over the former ones of some slots in one launch, from one copy of their numbers."""

import struct
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.kernels.triton import tl, triton

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


def place_rows_reference(state: DecodingState, packed: Tensor, first: int, stops: int) -> None:
    """Plain PyTorch for `place_rows`."""
    slots = slice(first, first + len(packed))
    for column, numbers in enumerate((state.length, state.limit, state.seeds, state.stop_count, state.top_k)):
        numbers[slots] = packed[:, column]
    state.temperature[slots] = packed[:, 5].int().view(torch.float32)
    state.top_p[slots] = packed[:, 6].contiguous().view(torch.float64)
    state.stop_ids[slots, :stops] = packed[:, PACKED_HEADER : PACKED_HEADER + stops]
    prompts = packed[:, PACKED_HEADER + stops :]
    state.tokens[slots, : prompts.shape[1]] = prompts
    state.read[slots] = 0
    for flags in (state.stopped, state.invalid_target, state.invalid_draft):
        flags[slots] = False
    state.finished[slots] = True


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


def place_rows(state: DecodingState, packed: Tensor, first: int, stops: int) -> None:
    """Writes rows that come in over the former ones of the slots from `first` on, as they are before their prompts are
    read.

    packed [rows, ...] int64: `pack_rows` on the slots' device, of rows with `stops` stop ids, padding included.
    """
    if not uses_kernels(packed):
        place_rows_reference(state, packed, first, stops)
        return
    _place_kernel[(len(packed),)](
        packed, state.tokens, state.length, state.limit, state.finished, state.stopped, state.read, state.seeds,
        state.stop_ids, state.stop_count, state.temperature, state.top_k, state.top_p, state.invalid_target,
        state.invalid_draft, packed.stride(0), state.tokens.stride(0), state.stop_ids.stride(0), first, stops,
        packed.shape[1] - PACKED_HEADER - stops, HEADER=PACKED_HEADER, BLOCK=1024, num_warps=4,
    )  # fmt: skip
