"""The output head times a few states: the logits of a block's slots, at the speed of reading the head once.

A general product of so few rows leaves a part of the memory's bandwidth unused. The result is rounded to the dtype of
head and states, as the general product rounds it.
"""

import torch
from torch import Tensor

from draftsmith.kernels.device import overlapping, stages_that_fit, uses_kernels
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.triton import tl, triton

MAX_STATES = 64
"""The most states for which the kernel reads the head faster than the general product does."""


FEW = Tiling(columns=64, depth=128, warps=4, stages=4)
"""For up to 32 states."""
MORE = Tiling(columns=128, depth=128, warps=8, stages=3)
"""Beyond."""


def few_states_reference(states: Tensor, head: Tensor) -> Tensor:
    """Plain PyTorch for `few_states_logits`."""
    return torch.nn.functional.linear(states, head)


@triton.jit
def head_tile_in_kernel(  # type: ignore[no-untyped-def]
    states_ptr, head_ptr, rows, row_ok, tokens, vocabulary, inner, states_stride, head_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Logits [BLOCK_N, BLOCK_M] in fp32: rows `tokens` of the head times the states `rows`. EVEN: BLOCK_K divides
    `inner`. Waits for the kernel before this one where OVERLAP."""
    columns = tl.arange(0, BLOCK_K)
    # A tile past the end reads the last row again, and its values are the caller's to drop: so the loads need no mask.
    source = tl.minimum(tokens, vocabulary - 1).to(tl.int64)
    weights = head_ptr + source[:, None] * head_stride + columns[None, :]
    inputs = states_ptr + rows[None, :] * states_stride + columns[:, None]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for offset in range(0, inner, BLOCK_K):
        if EVEN:
            weight = tl.load(weights + offset)
            x = tl.load(inputs + offset, mask=row_ok[None, :], other=0.0)
        else:
            column_ok = columns + offset < inner
            weight = tl.load(weights + offset, mask=column_ok[None, :], other=0.0)
            x = tl.load(inputs + offset, mask=row_ok[None, :] & column_ok[:, None], other=0.0)
        total = tl.dot(weight, x, total, input_precision="ieee")
    return total


@triton.jit
def _logits_kernel(  # type: ignore[no-untyped-def]
    states_ptr, head_ptr, out_ptr, count, vocabulary, inner, states_stride, head_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    row_ok = rows < count
    total = head_tile_in_kernel(
        states_ptr, head_ptr, rows, row_ok, tokens, vocabulary, inner, states_stride, head_stride,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN, OVERLAP,
    )  # fmt: skip
    target = out_ptr + rows.to(tl.int64)[None, :] * vocabulary + tokens[:, None]
    ok = (tokens < vocabulary)[:, None] & row_ok[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=ok)


def few_states_logits(states: Tensor, head: Tensor) -> Tensor:
    """states [..., H] contiguous, head [V, H] with contiguous rows, of one dtype -> logits [..., V] in that dtype.

    Nearly as fast as reading the head for up to `MAX_STATES` states. Raises `ValueError` for shapes or dtypes that do
    not fit.
    """
    if not uses_kernels(states):
        return few_states_reference(states, head)
    vocabulary, inner = head.shape
    fits = states.shape[-1] == inner and states.dtype == head.dtype and head.stride(1) == 1
    if not fits or not states.is_contiguous():
        raise ValueError(f"states {tuple(states.shape)} {states.dtype}, head {tuple(head.shape)} {head.dtype}")
    count = states.numel() // inner
    tiling = FEW if count <= 32 else MORE
    block_n, block_k = tiling.columns, tiling.depth
    if states.dtype == torch.float32:
        block_k //= 2
    block_m = max(16, triton.next_power_of_2(count))
    stages = stages_that_fit(tiling.stages, (block_n + block_m) * block_k * head.element_size(), head.device)
    out = torch.empty(*states.shape[:-1], vocabulary, dtype=head.dtype, device=head.device)
    _logits_kernel[(triton.cdiv(vocabulary, block_n),)](
        states, head, out, count, vocabulary, inner, inner, head.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        EVEN=inner % block_k == 0, num_warps=tiling.warps, num_stages=stages, **overlapping(head.device),
    )  # fmt: skip
    return out


def head_logits(states: Tensor, head: Tensor) -> Tensor:
    """`few_states_logits` for up to `MAX_STATES` states of 16 bits, else the general product; arguments as there."""
    if states.shape[:-1].numel() <= MAX_STATES and head.element_size() == 2:
        return few_states_logits(states, head)
    return torch.nn.functional.linear(states, head)
