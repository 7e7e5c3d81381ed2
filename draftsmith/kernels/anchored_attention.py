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
import triton.language as tl
from torch import Tensor


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


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    first_slot, first_ptr, end_ptr, own_first_ptr, own_end_ptr, slots, context,
    STEP: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of a tile: slot, head in the group, whether there is such a row, and its runs (empty where not)."""
    index = tl.arange(0, ROWS)
    slot = first_slot + index // PADDED
    head = index % PADDED
    there = (slot < first_slot + STEP) & (slot < slots) & (head < GROUP)
    first = tl.load(first_ptr + slot, mask=there, other=context)
    end = tl.load(end_ptr + slot, mask=there, other=0)
    own_first = tl.load(own_first_ptr + slot, mask=there, other=0)
    own_end = tl.load(own_end_ptr + slot, mask=there, other=0)
    return slot, head, there, first, end, own_first, own_end


@triton.jit
def _whole(first, end, there, low, high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the keys that every row sees begin and end, in whole steps of BLOCK from `low`, both within [low, high]."""
    from_ = tl.max(tl.where(there, first, 0), 0)
    to = tl.min(tl.where(there, end, 2147483647), 0)
    begin = tl.minimum(low + (tl.maximum(from_ - low, 0) + BLOCK - 1) // BLOCK * BLOCK, high)
    stop = tl.maximum(begin, low + tl.maximum(to - low, 0) // BLOCK * BLOCK)
    return begin, tl.minimum(stop, high)


# --- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, acc, top, total, key_ptr, value_ptr, key_stride, value_stride, begin, stop, first, end, limit, factor,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIM)
    for start in tl.range(begin, stop, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        if MASKED:
            inside = (keys < limit)[:, None]
            k = tl.load(key_ptr + keys[:, None] * key_stride + dims[None, :], mask=inside, other=0.0)
            v = tl.load(value_ptr + keys[:, None] * value_stride + dims[None, :], mask=inside, other=0.0)
        else:
            k = tl.load(key_ptr + keys[:, None] * key_stride + dims[None, :])
            v = tl.load(value_ptr + keys[:, None] * value_stride + dims[None, :])
        scores = tl.dot(q, tl.trans(k)) * factor
        if MASKED:
            seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < end[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet stays at -inf, whose difference from itself is no number.
        base = tl.where(raised == float("-inf"), 0.0, raised)
        p = tl.exp2(scores - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc)
        top = raised
    return acc, top, total


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, ck_ptr, cv_ptr, bk_ptr, bv_ptr, out_ptr, lse_ptr,
    first_ptr, end_ptr, own_first_ptr, own_end_ptr,
    q_row, q_head, q_slot, ck_row, ck_head, ck_token, cv_row, cv_head, cv_token,
    bk_row, bk_head, bk_slot, bv_row, bv_head, bv_slot, out_row, out_head, out_slot,
    slots, context, kv_heads, factor,
    STEP: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # Later tiles have longer contexts: they go first.
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * STEP
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    at = row * slots
    slot, head, there, first, end, own_first, own_end = _rows(
        first_slot, first_ptr + at, end_ptr + at, own_first_ptr + at, own_end_ptr + at, slots, context,
        STEP, GROUP, PADDED, ROWS,
    )  # fmt: skip
    dims = tl.arange(0, DIM)
    heads = kv_head * GROUP + head
    q = tl.load(
        q_ptr + row * q_row + (heads * q_head + slot * q_slot)[:, None] + dims[None, :], mask=there[:, None], other=0.0
    )
    acc = tl.zeros((ROWS, DIM), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc, top, total = _attend(
        q, acc, top, total, bk_ptr + row * bk_row + kv_head * bk_head, bv_ptr + row * bv_row + kv_head * bv_head,
        bk_slot, bv_slot, first_slot, first_slot + OWN, own_first, own_end, slots, factor, True, OWN, DIM,
    )  # fmt: skip
    low = tl.min(first, 0) // KEYS * KEYS
    high = tl.max(end, 0)
    begin, stop = _whole(first, end, there, low, high, KEYS)
    key_ptr, value_ptr = ck_ptr + row * ck_row + kv_head * ck_head, cv_ptr + row * cv_row + kv_head * cv_head
    acc, top, total = _attend(
        q, acc, top, total, key_ptr, value_ptr, ck_token, cv_token, low, begin, first, end, context, factor,
        True, KEYS, DIM,
    )  # fmt: skip
    acc, top, total = _attend(
        q, acc, top, total, key_ptr, value_ptr, ck_token, cv_token, begin, stop, first, end, context, factor,
        False, KEYS, DIM,
    )  # fmt: skip
    acc, top, total = _attend(
        q, acc, top, total, key_ptr, value_ptr, ck_token, cv_token, stop, high, first, end, context, factor,
        True, KEYS, DIM,
    )  # fmt: skip
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr + row * out_row + (heads * out_head + slot * out_slot)[:, None] + dims[None, :],
        out.to(out_ptr.dtype.element_ty), mask=there[:, None],
    )  # fmt: skip
    tl.store(lse_ptr + (row * kv_heads * GROUP + heads) * slots + slot, top + tl.log2(total), mask=there)


# --- backward -------------------------------------------------------------------------------------------------------


@triton.jit
def _query_gradient(  # type: ignore[no-untyped-def]
    q, grad, dq, lse, delta, key_ptr, value_ptr, key_stride, value_stride, begin, stop, first, end, limit, factor,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIM)
    for start in tl.range(begin, stop, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        if MASKED:
            inside = (keys < limit)[:, None]
            k = tl.load(key_ptr + keys[:, None] * key_stride + dims[None, :], mask=inside, other=0.0)
            v = tl.load(value_ptr + keys[:, None] * value_stride + dims[None, :], mask=inside, other=0.0)
        else:
            k = tl.load(key_ptr + keys[:, None] * key_stride + dims[None, :])
            v = tl.load(value_ptr + keys[:, None] * value_stride + dims[None, :])
        p = tl.exp2(tl.dot(q, tl.trans(k)) * factor - lse[:, None])
        if MASKED:
            p = tl.where((keys[None, :] >= first[:, None]) & (keys[None, :] < end[:, None]), p, 0.0)
        ds = p * (tl.dot(grad, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def _query_gradient_kernel(  # type: ignore[no-untyped-def]
    q_ptr, ck_ptr, cv_ptr, bk_ptr, bv_ptr, out_ptr, grad_ptr, lse_ptr, lse_grad_ptr, delta_ptr,
    dq_ptr, dbk_ptr, dbv_ptr,
    first_ptr, end_ptr, own_first_ptr, own_end_ptr,
    q_row, q_head, q_slot, ck_row, ck_head, ck_token, cv_row, cv_head, cv_token,
    bk_row, bk_head, bk_slot, bv_row, bv_head, bv_slot, out_row, out_head, out_slot, grad_row, grad_head, grad_slot,
    dq_row, dq_head, dq_slot, dbk_row, dbk_head, dbk_slot, dbv_row, dbv_head, dbv_slot,
    slots, context, kv_heads, factor, scale,
    HAS_LSE_GRAD: tl.constexpr,
    STEP: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, of the blocks' own keys and values, and what the other kernel needs of every row."""
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * STEP
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    at = row * slots
    slot, head, there, first, end, own_first, own_end = _rows(
        first_slot, first_ptr + at, end_ptr + at, own_first_ptr + at, own_end_ptr + at, slots, context,
        STEP, GROUP, PADDED, ROWS,
    )  # fmt: skip
    dims = tl.arange(0, DIM)
    heads = kv_head * GROUP + head
    inside = there[:, None]
    q = tl.load(q_ptr + row * q_row + (heads * q_head + slot * q_slot)[:, None] + dims[None, :], mask=inside, other=0.0)
    out_at = row * out_row + (heads * out_head + slot * out_slot)[:, None] + dims[None, :]
    grad_at = row * grad_row + (heads * grad_head + slot * grad_slot)[:, None] + dims[None, :]
    grad = tl.load(grad_ptr + grad_at, mask=inside, other=0.0)
    out = tl.load(out_ptr + out_at, mask=inside, other=0.0)
    row_at = (row * kv_heads * GROUP + heads) * slots + slot
    lse = tl.load(lse_ptr + row_at, mask=there, other=float("inf"))
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if HAS_LSE_GRAD:
        # The denominator's natural logarithm depends on each score by its probability.
        delta -= 1.4426950408889634 * tl.load(lse_grad_ptr + row_at, mask=there, other=0.0)
    tl.store(delta_ptr + row_at, delta, mask=there)

    # The block's own keys: no other row sees them.
    keys = first_slot + tl.arange(0, OWN)
    own = (keys < first_slot + STEP) & (keys < slots)
    bk_at = row * bk_row + kv_head * bk_head + keys[:, None] * bk_slot + dims[None, :]
    bv_at = row * bv_row + kv_head * bv_head + keys[:, None] * bv_slot + dims[None, :]
    k = tl.load(bk_ptr + bk_at, mask=own[:, None], other=0.0)
    v = tl.load(bv_ptr + bv_at, mask=own[:, None], other=0.0)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * factor - lse[:, None])
    p = tl.where((keys[None, :] >= own_first[:, None]) & (keys[None, :] < own_end[:, None]), p, 0.0)
    ds = (p * (tl.dot(grad, tl.trans(v)) - delta[:, None])).to(k.dtype)
    dv = tl.dot(tl.trans(p.to(grad.dtype)), grad)
    dbv_at = row * dbv_row + kv_head * dbv_head + keys[:, None] * dbv_slot + dims[None, :]
    tl.store(dbv_ptr + dbv_at, dv.to(dbv_ptr.dtype.element_ty), mask=own[:, None])
    dk = tl.dot(tl.trans(ds), q) * scale
    dbk_at = row * dbk_row + kv_head * dbk_head + keys[:, None] * dbk_slot + dims[None, :]
    tl.store(dbk_ptr + dbk_at, dk.to(dbk_ptr.dtype.element_ty), mask=own[:, None])
    dq = tl.dot(ds, k)

    low = tl.min(first, 0) // KEYS * KEYS
    high = tl.max(end, 0)
    begin, stop = _whole(first, end, there, low, high, KEYS)
    key_ptr, value_ptr = ck_ptr + row * ck_row + kv_head * ck_head, cv_ptr + row * cv_row + kv_head * cv_head
    dq = _query_gradient(
        q, grad, dq, lse, delta, key_ptr, value_ptr, ck_token, cv_token, low, begin, first, end, context, factor,
        True, KEYS, DIM,
    )  # fmt: skip
    dq = _query_gradient(
        q, grad, dq, lse, delta, key_ptr, value_ptr, ck_token, cv_token, begin, stop, first, end, context, factor,
        False, KEYS, DIM,
    )  # fmt: skip
    dq = _query_gradient(
        q, grad, dq, lse, delta, key_ptr, value_ptr, ck_token, cv_token, stop, high, first, end, context, factor,
        True, KEYS, DIM,
    )  # fmt: skip
    dq_at = row * dq_row + (heads * dq_head + slot * dq_slot)[:, None] + dims[None, :]
    tl.store(dq_ptr + dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _key_gradient(  # type: ignore[no-untyped-def]
    k, v, dk, dv, keys, q_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, end_ptr,
    q_head, q_slot, grad_head, grad_slot, begin, stop, slots, factor,
    MASKED: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, DIM)
    index = tl.arange(0, ROWS)
    head = index % PADDED
    for start in tl.range(begin, stop, ROWS // PADDED):
        slot = start + index // PADDED
        there = (slot < stop) & (head < GROUP)
        q = tl.load(q_ptr + (head * q_head + slot * q_slot)[:, None] + dims[None, :], mask=there[:, None], other=0.0)
        grad = tl.load(
            grad_ptr + (head * grad_head + slot * grad_slot)[:, None] + dims[None, :], mask=there[:, None], other=0.0
        )
        row_at = head * slots + slot
        lse = tl.load(lse_ptr + row_at, mask=there, other=float("inf"))
        delta = tl.load(delta_ptr + row_at, mask=there, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * factor - lse[None, :])  # [keys, rows]
        if MASKED:
            first = tl.load(first_ptr + slot, mask=there, other=2147483647)
            end = tl.load(end_ptr + slot, mask=there, other=0)
            p = tl.where((keys[:, None] >= first[None, :]) & (keys[:, None] < end[None, :]), p, 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        ds = p * (tl.dot(v, tl.trans(grad)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _key_gradient_kernel(  # type: ignore[no-untyped-def]
    q_ptr, ck_ptr, cv_ptr, grad_ptr, lse_ptr, delta_ptr, dck_ptr, dcv_ptr,
    first_ptr, end_ptr, by_key_ptr,
    q_row, q_head, q_slot, ck_row, ck_head, ck_token, cv_row, cv_head, cv_token, grad_row, grad_head, grad_slot,
    dck_row, dck_head, dck_token, dcv_row, dcv_head, dcv_token,
    slots, context, kv_heads, factor, scale,
    GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Gradients of the context's keys and values: a program for every tile of them, over the slots that see it."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    bounds_ptr = by_key_ptr + (row * tl.num_programs(0) + tile) * 4
    begin, stop = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    whole_begin, whole_stop = tl.load(bounds_ptr + 2), tl.load(bounds_ptr + 3)
    whole_begin = tl.minimum(tl.maximum(whole_begin, begin), tl.maximum(stop, begin))
    whole_stop = tl.minimum(tl.maximum(whole_stop, whole_begin), tl.maximum(stop, begin))
    keys = tile * KEYS + tl.arange(0, KEYS)
    inside = (keys < context)[:, None]
    dims = tl.arange(0, DIM)
    k = tl.load(
        ck_ptr + row * ck_row + kv_head * ck_head + keys[:, None] * ck_token + dims[None, :], mask=inside, other=0.0
    )
    v = tl.load(
        cv_ptr + row * cv_row + kv_head * cv_head + keys[:, None] * cv_token + dims[None, :], mask=inside, other=0.0
    )
    dk = tl.zeros((KEYS, DIM), tl.float32)
    dv = tl.zeros((KEYS, DIM), tl.float32)
    heads = kv_head * GROUP
    q_ptr += row * q_row + heads * q_head
    grad_ptr += row * grad_row + heads * grad_head
    lse_ptr += (row * kv_heads * GROUP + heads) * slots
    delta_ptr += (row * kv_heads * GROUP + heads) * slots
    first_ptr += row * slots
    end_ptr += row * slots
    dk, dv = _key_gradient(
        k, v, dk, dv, keys, q_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, end_ptr,
        q_head, q_slot, grad_head, grad_slot, begin, whole_begin, slots, factor, True, GROUP, PADDED, ROWS, DIM,
    )  # fmt: skip
    dk, dv = _key_gradient(
        k, v, dk, dv, keys, q_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, end_ptr,
        q_head, q_slot, grad_head, grad_slot, whole_begin, whole_stop, slots, factor, False, GROUP, PADDED, ROWS, DIM,
    )  # fmt: skip
    dk, dv = _key_gradient(
        k, v, dk, dv, keys, q_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, end_ptr,
        q_head, q_slot, grad_head, grad_slot, whole_stop, stop, slots, factor, True, GROUP, PADDED, ROWS, DIM,
    )  # fmt: skip
    dck_at = row * dck_row + kv_head * dck_head + keys[:, None] * dck_token + dims[None, :]
    tl.store(dck_ptr + dck_at, (dk * scale).to(dck_ptr.dtype.element_ty), mask=inside)
    dcv_at = row * dcv_row + kv_head * dcv_head + keys[:, None] * dcv_token + dims[None, :]
    tl.store(dcv_ptr + dcv_at, dv.to(dcv_ptr.dtype.element_ty), mask=inside)


# --- the functions --------------------------------------------------------------------------------------------------


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
    _forward_kernel[grid](
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
    _query_gradient_kernel[grid](
        q, ck, cv, bk, bv, out, grad, lse, lse if lse_grad is None else lse_grad.contiguous(), delta, dq, dbk, dbv,
        runs.context_first, runs.context_end, runs.own_first, runs.own_end,
        *_strides(q), *_strides(ck), *_strides(cv), *_strides(bk), *_strides(bv), *_strides(out), *_strides(grad),
        *_strides(dq), *_strides(dbk), *_strides(dbv),
        slots, context, kv_heads, scale * LOG2_E, scale, HAS_LSE_GRAD=lse_grad is not None,
        **shape, KEYS=tiling.dq_keys, num_warps=tiling.dq_warps, num_stages=tiling.dq_stages,
    )  # fmt: skip
    padded = shape["PADDED"]
    grid = (triton.cdiv(context, KEYS), kv_heads, rows)
    _key_gradient_kernel[grid](
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
