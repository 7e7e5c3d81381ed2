"""Training attention: slots of anchored blocks over one run of context tokens and one run of their own block's slots.

Flash attention for that shape of mask. A program takes the query heads of one key head together, so that its tile of
rows spans few blocks: their contexts nearly coincide, and their own keys are one small tile. Tiles of keys that every
row of the tile sees whole are multiplied without a mask.

The reference is `drafts.attention.DenseBlockAttention`; `blocks.anchored` makes the runs and picks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from draftsmith.kernels.anchored_backward import key_gradient_kernel, query_gradient_kernel
from draftsmith.kernels.anchored_forward import forward_kernel


@dataclass(frozen=True)
class Runs:
    """What the slots see, int32: context_first, context_end, own_first, own_end [R, T], first key and end of each run,
    own keys counted as slots; by_key [R, ceil(S / KEYS), 4], for every tile of KEYS context tokens: the first slot and
    the end of those that see any of it, and of those that see all of it. Slots of one block see the same context, or
    (sliding) nearly; blocks are in the order of their anchors."""

    context_first: Tensor
    context_end: Tensor
    own_first: Tensor
    own_end: Tensor
    by_key: Tensor
    block_size: int


KEYS = 128
"""Context tokens of one program of the backward for keys and values."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiling:
    """Rows (slots times query heads of a key head) and keys of a tile, warps and stages, of the three kernels."""

    rows: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 3
    dq_rows: int = 128
    dq_keys: int = 64
    dq_warps: int = 8
    dq_stages: int = 2
    dkv_rows: int = 32
    dkv_warps: int = 8
    dkv_stages: int = 3


def _shape(q: Tensor, kv_heads: int, rows: int, block_size: int) -> dict[str, int]:
    """The compile-time sizes that the kernels over rows share."""
    group = q.shape[1] // kv_heads
    padded = triton.next_power_of_2(group)
    rows = max(rows, padded * triton.next_power_of_2(block_size), 16 * padded)
    own = rows // padded
    return {
        "STEP": own // block_size * block_size,
        "GROUP": group,
        "PADDED": padded,
        "ROWS": rows,
        "OWN": own,
        "DIM": q.shape[-1],
    }


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def _like(rows: int, heads: int, tokens: int, like: Tensor) -> Tensor:
    """[rows, heads, tokens, d], laid out so that the heads of a token are side by side."""
    return like.new_empty(rows, tokens, heads, like.shape[-1]).transpose(1, 2)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def attend(
    q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, runs: Runs, scale: float, tiling: Tiling
) -> tuple[Tensor, Tensor]:
    """(mixed [R, heads, T, d], log2 of the softmax's denominator [R, heads, T] float32); see `anchored_attention`."""
    rows, heads, slots, _ = q.shape
    kv_heads, context = ck.shape[1:3]
    shape = _shape(q, kv_heads, tiling.rows, runs.block_size)
    out = _like(rows, heads, slots, q)
    lse = torch.empty(rows, heads, slots, dtype=torch.float32, device=q.device)
    grid: Any = (triton.cdiv(slots, shape["STEP"]), kv_heads, rows)
    forward_kernel[grid](
        q, ck, cv, bk, bv, out, lse, runs.context_first, runs.context_end, runs.own_first, runs.own_end,
        *_strides(q), *_strides(ck), *_strides(cv), *_strides(bk), *_strides(bv), *_strides(out),
        slots, context, kv_heads, scale * LOG2_E,
        **shape, KEYS=tiling.keys, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out, lse


def attend_backward(
    grad: Tensor,
    lse_grad: Tensor | None,
    q: Tensor,
    ck: Tensor,
    cv: Tensor,
    bk: Tensor,
    bv: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: Runs,
    scale: float,
    tiling: Tiling,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five inputs, laid out as they are; lse_grad: that of `lse`."""
    rows, heads, slots, _ = q.shape
    kv_heads, context = ck.shape[1:3]
    grad = _dense(grad)
    dq, dck, dcv, dbk, dbv = (torch.empty_like(tensor) for tensor in (q, ck, cv, bk, bv))
    delta = torch.empty_like(lse)
    shape = _shape(q, kv_heads, tiling.dq_rows, runs.block_size)
    grid: Any = (triton.cdiv(slots, shape["STEP"]), kv_heads, rows)
    query_gradient_kernel[grid](
        q, ck, cv, bk, bv, out, grad, lse, lse if lse_grad is None else lse_grad.contiguous(), delta, dq, dbk, dbv,
        runs.context_first, runs.context_end, runs.own_first, runs.own_end,
        *_strides(q), *_strides(ck), *_strides(cv), *_strides(bk), *_strides(bv), *_strides(out), *_strides(grad),
        *_strides(dq), *_strides(dbk), *_strides(dbv),
        slots, context, kv_heads, scale * LOG2_E, scale, HAS_LSE_GRAD=lse_grad is not None,
        **shape, KEYS=tiling.dq_keys, num_warps=tiling.dq_warps, num_stages=tiling.dq_stages,
    )  # fmt: skip
    padded = shape["PADDED"]
    grid = (triton.cdiv(context, KEYS), kv_heads, rows)
    key_gradient_kernel[grid](
        q, ck, cv, grad, lse, delta, dck, dcv, runs.context_first, runs.context_end, runs.by_key,
        *_strides(q), *_strides(ck), *_strides(cv), *_strides(grad), *_strides(dck), *_strides(dcv),
        slots, context, kv_heads, scale * LOG2_E, scale,
        GROUP=shape["GROUP"], PADDED=padded, ROWS=max(tiling.dkv_rows, 16, padded), KEYS=KEYS, DIM=q.shape[-1],
        num_warps=tiling.dkv_warps, num_stages=tiling.dkv_stages,
    )  # fmt: skip
    return dq, dck, dcv, dbk, dbv


class _AnchoredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        ck: Tensor,
        cv: Tensor,
        bk: Tensor,
        bv: Tensor,
        runs: Runs,
        scale: float,
        tiling: Tiling,
    ) -> tuple[Tensor, Tensor]:
        q, ck, cv, bk, bv = (_dense(tensor) for tensor in (q, ck, cv, bk, bv))
        out, lse = attend(q, ck, cv, bk, bv, runs, scale, tiling)
        ctx.save_for_backward(q, ck, cv, bk, bv, out, lse)
        ctx.settings = (runs, scale, tiling)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad, lse_grad = gradients
        q, ck, cv, bk, bv, out, lse = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(out)
        return *attend_backward(grad, lse_grad, q, ck, cv, bk, bv, out, lse, *ctx.settings), None, None, None


def anchored_attention(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    runs: Runs,
    *,
    scale: float,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """(mixed [R, heads, T, d], log2 of the softmax's denominator [R, heads, T] float32), differentiable both.

    q [R, heads, T, d]; context_k/v [R, kv_heads, S, d]; block_k/v [R, kv_heads, T, d], d a power of two of at least 16;
    runs: who sees what.
    """
    return _AnchoredAttention.apply(q, context_k, context_v, block_k, block_v, runs, scale, tiling or _tiling(q))


def _tiling(q: Tensor) -> Tiling:
    if q.element_size() == 4:  # what fits into shared memory
        return Tiling(rows=64, keys=32, stages=1, dq_rows=64, dq_keys=32, dq_stages=1, dkv_rows=16, dkv_stages=1)
    return Tiling()
