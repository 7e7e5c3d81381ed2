"""The backward kernels of `anchored_attention`: one over the slots, one over the context's keys."""

from draftsmith.kernels.attention.anchored_forward import rows_of_tile, whole_keys
from draftsmith.kernels.attention.exponents import LOG2_E_IN_KERNEL
from draftsmith.kernels.triton import tl, triton


@triton.jit
def _query_gradient(  # type: ignore[no-untyped-def]
    q, grad, dq, lse, delta, k_desc, v_desc, row, kv_head, begin, stop, first, end, factor,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, stop, BLOCK):
        k = k_desc.load([row, kv_head, start, 0]).reshape(BLOCK, DIM)
        v = v_desc.load([row, kv_head, start, 0]).reshape(BLOCK, DIM)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * factor - lse[:, None])
        if MASKED:
            keys = start + tl.arange(0, BLOCK)
            p = tl.where((keys[None, :] >= first[:, None]) & (keys[None, :] < end[:, None]), p, 0.0)
        ds = p * (tl.dot(grad, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def query_gradient_kernel(  # type: ignore[no-untyped-def]
    q_desc, grad_desc, ck_desc, cv_desc, bk_desc, bv_desc, out_ptr, lse_ptr, lse_grad_ptr, delta_ptr,
    dq_ptr, dbk_ptr, dbv_ptr, first_ptr, end_ptr, own_first_ptr, own_end_ptr,
    out_row, out_head, out_slot, dq_row, dq_head, dq_slot,
    dbk_row, dbk_head, dbk_slot, dbv_row, dbv_head, dbv_slot,
    slots, context, kv_heads, factor, scale,
    HAS_LSE_GRAD: tl.constexpr,
    STEP: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, of the blocks' own keys and values, and what the other kernel needs of every row."""
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * STEP
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    wide = row.to(tl.int64)
    at = wide * slots
    slot, head, there, first, end, own_first, own_end = rows_of_tile(
        first_slot, first_ptr + at, end_ptr + at, own_first_ptr + at, own_end_ptr + at, slots, context,
        STEP, GROUP, PADDED, ROWS,
    )  # fmt: skip
    dims = tl.arange(0, DIM)
    heads = kv_head * GROUP + head
    inside = there[:, None]
    q = q_desc.load([row, kv_head, first_slot, 0, 0]).reshape(ROWS, DIM)
    grad = grad_desc.load([row, kv_head, first_slot, 0, 0]).reshape(ROWS, DIM)
    out_at = wide * out_row + (heads * out_head + slot * out_slot)[:, None] + dims[None, :]
    out = tl.load(out_ptr + out_at, mask=inside, other=0.0)
    row_at = ((wide * kv_heads + kv_head) * slots + slot) * GROUP + head
    lse = tl.load(lse_ptr + row_at, mask=there, other=float("inf"))
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if HAS_LSE_GRAD:
        # The denominator's natural logarithm depends on each score by its probability.
        delta -= LOG2_E_IN_KERNEL * tl.load(lse_grad_ptr + row_at, mask=there, other=0.0)
    tl.store(delta_ptr + row_at, delta, mask=there)

    # The block's own keys: no other row sees them.
    keys = first_slot + tl.arange(0, OWN)
    own = (keys < first_slot + STEP) & (keys < slots)
    k = bk_desc.load([row, kv_head, first_slot, 0]).reshape(OWN, DIM)
    v = bv_desc.load([row, kv_head, first_slot, 0]).reshape(OWN, DIM)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * factor - lse[:, None])
    p = tl.where((keys[None, :] >= own_first[:, None]) & (keys[None, :] < own_end[:, None]), p, 0.0)
    ds = (p * (tl.dot(grad, tl.trans(v)) - delta[:, None])).to(k.dtype)
    dv = tl.dot(tl.trans(p.to(grad.dtype)), grad)
    dbv_at = wide * dbv_row + kv_head * dbv_head + keys[:, None] * dbv_slot + dims[None, :]
    tl.store(dbv_ptr + dbv_at, dv.to(dbv_ptr.dtype.element_ty), mask=own[:, None])
    dk = tl.dot(tl.trans(ds), q) * scale
    dbk_at = wide * dbk_row + kv_head * dbk_head + keys[:, None] * dbk_slot + dims[None, :]
    tl.store(dbk_ptr + dbk_at, dk.to(dbk_ptr.dtype.element_ty), mask=own[:, None])
    dq = tl.dot(ds, k)

    low = tl.min(first, 0) // KEYS * KEYS
    high = tl.max(end, 0)
    begin, stop = whole_keys(first, end, there, low, high, KEYS)
    dq = _query_gradient(
        q, grad, dq, lse, delta, ck_desc, cv_desc, row, kv_head, low, begin, first, end, factor, True, KEYS, DIM
    )
    dq = _query_gradient(
        q, grad, dq, lse, delta, ck_desc, cv_desc, row, kv_head, begin, stop, first, end, factor, False, KEYS, DIM
    )
    dq = _query_gradient(
        q, grad, dq, lse, delta, ck_desc, cv_desc, row, kv_head, stop, high, first, end, factor, True, KEYS, DIM
    )
    dq_at = wide * dq_row + (heads * dq_head + slot * dq_slot)[:, None] + dims[None, :]
    tl.store(dq_ptr + dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _key_gradient(  # type: ignore[no-untyped-def]
    k, v, dk, dv, keys, q_desc, grad_desc, lse_ptr, delta_ptr, first_ptr, end_ptr, row, kv_head, begin, stop, factor,
    MASKED: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, ROWS)
    head = index % PADDED
    for start in tl.range(begin, stop, ROWS // PADDED):
        slot = start + index // PADDED
        there = (slot < stop) & (head < GROUP)
        q = q_desc.load([row, kv_head, start, 0, 0]).reshape(ROWS, DIM)
        grad = grad_desc.load([row, kv_head, start, 0, 0]).reshape(ROWS, DIM)
        row_at = slot * GROUP + head
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
def key_gradient_kernel(  # type: ignore[no-untyped-def]
    q_desc, grad_desc, ck_desc, cv_desc, lse_ptr, delta_ptr, dck_ptr, dcv_ptr, first_ptr, end_ptr, by_key_ptr,
    dck_row, dck_head, dck_token, dcv_row, dcv_head, dcv_token,
    slots, context, kv_heads, factor, scale,
    GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Gradients of the context's keys and values: a program for every tile of them, over the slots that see it."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    wide = row.to(tl.int64)
    bounds_ptr = by_key_ptr + (row * tl.num_programs(0) + tile) * 4
    begin, stop = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    whole_begin, whole_stop = tl.load(bounds_ptr + 2), tl.load(bounds_ptr + 3)
    whole_begin = tl.minimum(tl.maximum(whole_begin, begin), tl.maximum(stop, begin))
    whole_stop = tl.minimum(tl.maximum(whole_stop, whole_begin), tl.maximum(stop, begin))
    keys = tile * KEYS + tl.arange(0, KEYS)
    inside = (keys < context)[:, None]
    dims = tl.arange(0, DIM)
    k = ck_desc.load([row, kv_head, tile * KEYS, 0]).reshape(KEYS, DIM)
    v = cv_desc.load([row, kv_head, tile * KEYS, 0]).reshape(KEYS, DIM)
    dk = tl.zeros((KEYS, DIM), tl.float32)
    dv = tl.zeros((KEYS, DIM), tl.float32)
    rows_at = (wide * kv_heads + kv_head) * GROUP * slots
    lse_ptr += rows_at
    delta_ptr += rows_at
    first_ptr += wide * slots
    end_ptr += wide * slots
    dk, dv = _key_gradient(
        k, v, dk, dv, keys, q_desc, grad_desc, lse_ptr, delta_ptr, first_ptr, end_ptr, row, kv_head,
        begin, whole_begin, factor, True, GROUP, PADDED, ROWS, DIM,
    )  # fmt: skip
    dk, dv = _key_gradient(
        k, v, dk, dv, keys, q_desc, grad_desc, lse_ptr, delta_ptr, first_ptr, end_ptr, row, kv_head,
        whole_begin, whole_stop, factor, False, GROUP, PADDED, ROWS, DIM,
    )  # fmt: skip
    dk, dv = _key_gradient(
        k, v, dk, dv, keys, q_desc, grad_desc, lse_ptr, delta_ptr, first_ptr, end_ptr, row, kv_head,
        whole_stop, stop, factor, True, GROUP, PADDED, ROWS, DIM,
    )  # fmt: skip
    dck_at = wide * dck_row + kv_head * dck_head + keys[:, None] * dck_token + dims[None, :]
    tl.store(dck_ptr + dck_at, (dk * scale).to(dck_ptr.dtype.element_ty), mask=inside)
    dcv_at = wide * dcv_row + kv_head * dcv_head + keys[:, None] * dcv_token + dims[None, :]
    tl.store(dcv_ptr + dcv_at, dv.to(dcv_ptr.dtype.element_ty), mask=inside)
