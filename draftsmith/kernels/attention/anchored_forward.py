"""The forward kernel of `anchored_attention`, and what its kernels share.

Tensors come as descriptors, so that tiles are copied by the GPU's own copy engine where it has one: no addresses are
held in registers, of which these kernels have too few. What lies outside of a tensor reads as 0.

    queries, gradients of outputs   [R, kv_heads, T, GROUP, d]   tiles [1, 1, slots, PADDED, d]
    keys, values                    [R, kv_heads, S or T, d]     tiles [1, 1, keys, d]
"""

from draftsmith.kernels.triton import tl, triton


@triton.jit
def rows_of_tile(  # type: ignore[no-untyped-def]
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
    q, acc, top, total, k_desc, v_desc, row, kv_head, begin, stop, first, end, factor,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, stop, BLOCK):
        k = k_desc.load([row, kv_head, start, 0]).reshape(BLOCK, DIM)
        v = v_desc.load([row, kv_head, start, 0]).reshape(BLOCK, DIM)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            keys = start + tl.arange(0, BLOCK)
            seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < end[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(top, tl.max(scores, 1) * factor)
        base = raised
        if MASKED:
            # A row that has seen nothing yet stays at -inf, whose difference from itself is no number.
            base = tl.where(raised == float("-inf"), 0.0, raised)
        p = tl.exp2(scores * factor - base[:, None])  # one instruction before the exponential
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc)
        top = raised
    return acc, top, total


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    q_desc, ck_desc, cv_desc, bk_desc, bv_desc, out_ptr, lse_ptr,
    first_ptr, end_ptr, own_first_ptr, own_end_ptr, out_row, out_head, out_slot,
    slots, context, kv_heads, factor,
    STEP: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # Later tiles have longer contexts: they go first.
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * STEP
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    wide = row.to(tl.int64)
    at = wide * slots
    slot, head, there, first, end, own_first, own_end = rows_of_tile(
        first_slot, first_ptr + at, end_ptr + at, own_first_ptr + at, own_end_ptr + at, slots, context,
        STEP, GROUP, PADDED, ROWS,
    )  # fmt: skip
    q = q_desc.load([row, kv_head, first_slot, 0, 0]).reshape(ROWS, DIM)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc, top, total = _attend(
        q, acc, top, total, bk_desc, bv_desc, row, kv_head, first_slot, first_slot + OWN, own_first, own_end, factor,
        True, OWN, DIM,
    )  # fmt: skip
    low = tl.min(first, 0) // KEYS * KEYS
    high = tl.max(end, 0)
    begin, stop = whole_keys(first, end, there, low, high, KEYS)
    acc, top, total = _attend(
        q, acc, top, total, ck_desc, cv_desc, row, kv_head, low, begin, first, end, factor, True, KEYS, DIM
    )
    acc, top, total = _attend(
        q, acc, top, total, ck_desc, cv_desc, row, kv_head, begin, stop, first, end, factor, False, KEYS, DIM
    )
    acc, top, total = _attend(
        q, acc, top, total, ck_desc, cv_desc, row, kv_head, stop, high, first, end, factor, True, KEYS, DIM
    )
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    heads = kv_head * GROUP + head
    out_at = wide * out_row + (heads * out_head + slot * out_slot)[:, None] + tl.arange(0, DIM)[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=there[:, None])
    lse_at = ((wide * kv_heads + kv_head) * slots + slot) * GROUP + head
    tl.store(lse_ptr + lse_at, top + tl.log2(total), mask=there)
