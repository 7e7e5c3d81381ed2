"""The forward kernel of `anchored_attention`, and what its kernels share."""

import triton
import triton.language as tl


@triton.jit
def tile_rows(  # type: ignore[no-untyped-def]
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
def whole_keys(first, end, there, low, high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the keys that every row sees begin and end, in whole steps of BLOCK from `low`, both within [low, high]."""
    from_ = tl.max(tl.where(there, first, 0), 0)
    to = tl.min(tl.where(there, end, 2147483647), 0)
    begin = tl.minimum(low + (tl.maximum(from_ - low, 0) + BLOCK - 1) // BLOCK * BLOCK, high)
    stop = tl.maximum(begin, low + tl.maximum(to - low, 0) // BLOCK * BLOCK)
    return begin, tl.minimum(stop, high)


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
def forward_kernel(  # type: ignore[no-untyped-def]
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
    slot, head, there, first, end, own_first, own_end = tile_rows(
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
    begin, stop = whole_keys(first, end, there, low, high, KEYS)
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
