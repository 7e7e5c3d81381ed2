"""Attention of consecutive query tokens per row against a static key/value cache, for decoding and for prefill.

`block_attention` takes w query tokens of every row (a verify's tokens, the slots of a draft block, a chunk of a
prompt), whose own keys and values already stand in the cache, and attends over what each query may see. It reads
positions on the device, so one CUDA graph serves every length, and only visible cache entries are read: time grows
with the row's length, not with the cache's.

The kernel packs the queries of all query heads that share a key/value head into tiles (GQA). Where these are too few
to fill the device, n programs share the context of each: program i reads every n-th tile of keys, from *absolute*
tile i on, and a second launch joins what they found. So the work is even at any length, and which keys are summed
together depends neither on where the block starts nor on the cache's length. A masked key adds an exact zero. Hence a
query gives bitwise the same result from any slot of a block, beside any neighbours and in any context bucket: that is
what makes speculative and plain decoding comparable bit for bit in bf16.
"""

import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.base.dtypes import DTYPES
from draftsmith.kernels.attention.exponents import LOG2_E, LOG2_E_IN_KERNEL
from draftsmith.kernels.attention.visibility import MAX_TREE, CachePattern
from draftsmith.kernels.device import overlapping, shared_memory, uses_kernels
from draftsmith.kernels.strides import outer_strides, position_strides
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.triton import tl, triton

MAX_SPLITS = 32
"""Most programs that share the context of one tile of queries."""


def block_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pattern: CachePattern,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Plain PyTorch for `block_attention`, in fp32. Same arguments, same result up to rounding."""
    batch, heads, width, _ = q.shape
    groups = heads // keys.shape[1]
    visible = pattern.mask(width, keys.shape[2])  # [batch, 1, width, length]
    # Entries that nobody may see can hold anything, NaN included.
    seen = visible.any(2).unsqueeze(-1)
    k = keys.float().masked_fill(~seen, 0.0).repeat_interleave(groups, 1)
    v = values.float().masked_fill(~seen, 0.0).repeat_interleave(groups, 1)
    scores = (q.float() @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, heads, 1, 1).expand(batch, heads, width, 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return (weights @ v).to(q.dtype)


def masked_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pattern: CachePattern,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`block_attention` where no kernel runs: PyTorch's operations under a mask, in the dtype of the operands, whose
    entries must all be finite. Values [batch, kv_heads, length, n] may be of another width than keys."""
    batch, heads, width, dim = q.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    # Query heads that share a key head become more queries of that head, so that no key is read or copied twice.
    query = q.reshape(batch, kv_heads, groups * width, dim)
    visible = pattern.mask(width, keys.shape[2], groups)
    if softcap is None and sinks is None:
        out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale)
        return out.reshape(batch, heads, width, values.shape[-1])
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float().masked_fill(~visible, float("-inf"))
    if sinks is not None:
        of_query = sinks.float().view(kv_heads, groups, 1, 1).expand(-1, -1, width, -1).flatten(1, 2)
        scores = torch.cat((scores, of_query.expand(batch, -1, -1, -1)), dim=-1)
    weights = functional.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return (weights.to(values.dtype) @ values).reshape(batch, heads, width, values.shape[-1])


@triton.jit(do_not_specialize=["width"])  # one program for prompts of any length
def _attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, position_ptr, ancestors_ptr, sinks_ptr, partial_ptr, lse_ptr, out_ptr,
    q_stride_b, q_stride_h, q_stride_w, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    position_stride_b, position_stride_w, out_stride_b, out_stride_h, out_stride_w, scale, unit, softcap, width,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    TREE: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0)
    split = tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # The last tile sees the most keys, so it starts first.
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    batch = (row_head // KV_HEADS).to(tl.int64)
    kv_head = row_head % KV_HEADS

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < GROUPS * width
    slot = rows % width
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DIM
    positions = position_ptr + batch * position_stride_b
    query_position = tl.load(positions + slot * position_stride_w).to(tl.int32) + slot * STEP
    # Keys from `first` to `end` are all that any query of this tile sees; those below `common` are seen by each.
    lowest = tl.min(tl.where(row_ok, query_position, 2147483647), 0)
    if TREE:  # the block's own keys, from `block` on, are seen by their descendants
        block = tl.load(positions).to(tl.int32)
        above = tl.load(ancestors_ptr + batch * width + slot, mask=row_ok, other=0)
        end = block + width
        common = block
    elif CAUSAL:
        end = tl.max(tl.where(row_ok, query_position, -1), 0) + 1
        common = lowest + 1
    else:
        end = tl.load(positions + (width - 1) * position_stride_w).to(tl.int32) + (width - 1) * STEP + 1
        common = end
    first = 0
    if WINDOW > 0:
        first = tl.maximum(lowest - (WINDOW - 1), 0)
        common = 0
    # This program's tiles of keys: those whose number leaves `split` when divided by SPLITS.
    first_tile = first // BLOCK_N
    low = (first_tile + (split + SPLITS - first_tile % SPLITS) % SPLITS) * BLOCK_N

    # Results of one split: [batch * kv_heads, SPLITS, GROUPS * width (, DIM)]
    base = (row_head.to(tl.int64) * SPLITS + split) * (GROUPS * width)
    if SPLITS > 1 and (low >= end):
        tl.store(lse_ptr + base + rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_ok)
        return

    q_offset = (kv_head * GROUPS + rows // width).to(tl.int64) * q_stride_h + slot.to(tl.int64) * q_stride_w
    q_from = q_ptr + batch * q_stride_b + q_offset
    q = tl.load(q_from[:, None] + dims[None, :], mask=row_ok[:, None] & dim_ok[None, :], other=0.0)
    k_from = k_ptr + batch * k_stride_b + kv_head.to(tl.int64) * k_stride_h
    v_from = v_ptr + batch * v_stride_b + kv_head.to(tl.int64) * v_stride_h

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS and SPLITS == 1:  # a sink is a key without value; of several splits, the join adds it
        sink = tl.load(sinks_ptr + kv_head * GROUPS + rows // width, mask=row_ok, other=float("-inf")).to(tl.float32)
        best = sink * LOG2_E_IN_KERNEL
    total = tl.where(best == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for offset in range(low, end, SPLITS * BLOCK_N):
        keys = offset + tl.arange(0, BLOCK_N)
        # Nothing past the last query is read: what stale entries hold must not matter, not even a NaN.
        load_ok = (keys < end)[:, None] & dim_ok[None, :]
        k = tl.load(k_from + keys[:, None] * k_stride_n + dims[None, :], mask=load_ok, other=0.0)
        v = tl.load(v_from + keys[:, None] * v_stride_n + dims[None, :], mask=load_ok, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1): saturates without overflow trouble at either end.
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores * unit / softcap) + 1.0))
        if offset + BLOCK_N > common:  # most tiles of a long context need no mask, which costs more than the softmax
            visible = (keys < end)[None, :] & row_ok[:, None]
            key_position = keys
            if TREE:
                own = tl.minimum(tl.maximum(keys - block, 0), 63)
                visible = visible & (
                    (keys < block)[None, :] | (((above[:, None] >> own.to(tl.int64)[None, :]) & 1) > 0)
                )
                if WINDOW > 0:
                    of_own = tl.load(positions + own * position_stride_w, mask=own < width, other=0).to(tl.int32)
                    key_position = tl.where(keys < block, keys, of_own)
            distance = query_position[:, None] - key_position[None, :]
            if CAUSAL and not TREE:
                visible = visible & (distance >= 0)
            if WINDOW > 0:
                visible = visible & (distance < WINDOW) & (-distance < WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * scale)
        # A row that has seen nothing yet keeps a finite reference, so that no inf - inf arises.
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        # Rounded once whether or not the tile was masked: which tiles are must not show in the result.
        weights = tl.exp2(tl.fma(scores, scale + tl.zeros_like(scores), -reference[:, None] + tl.zeros_like(scores)))
        decay = tl.exp2(best - reference)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        best = new_best

    seen = total > 0.0
    divisor = tl.where(seen, total, 1.0)
    result = acc / divisor[:, None]
    inside = row_ok[:, None] & dim_ok[None, :]
    if SPLITS > 1:
        lse = tl.where(seen, best + tl.log2(divisor), float("-inf"))
        tl.store(lse_ptr + base + rows, lse, mask=row_ok)
        tl.store(partial_ptr + (base + rows)[:, None] * DIM + dims[None, :], result, mask=inside)
    else:
        out_offset = (kv_head * GROUPS + rows // width).to(tl.int64) * out_stride_h + slot.to(tl.int64) * out_stride_w
        out_from = out_ptr + batch * out_stride_b + out_offset
        tl.store(out_from[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["width"])  # one program for prompts of any length
def _join_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, lse_ptr, sinks_ptr, out_ptr, out_stride_b, out_stride_h, out_stride_w, width,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch = (row_head // KV_HEADS).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = rows < GROUPS * width
    head = (row_head % KV_HEADS) * GROUPS + rows // width
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DIM
    splits = tl.arange(0, SPLITS)
    index = (row_head.to(tl.int64) * SPLITS + splits[:, None]) * (GROUPS * width) + rows[None, :]  # [SPLITS, BLOCK_R]
    lse = tl.load(lse_ptr + index, mask=row_ok[None, :], other=float("-inf"))
    # Both loads start at once; what an empty split left unwritten is dropped afterwards.
    there = row_ok[None, :, None] & dim_ok[None, None, :]
    partial = tl.load(partial_ptr + index[:, :, None] * DIM + dims[None, None, :], mask=there, other=0.0)
    partial = tl.where((lse > float("-inf"))[:, :, None], partial, 0.0)

    best = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=row_ok, other=float("-inf")).to(tl.float32) * LOG2_E_IN_KERNEL
        best = tl.maximum(best, sink)
    reference = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2(lse - reference[None, :])
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - reference)
    result = tl.sum(weights[:, :, None] * partial, 0) / tl.where(row_ok, total, 1.0)[:, None]
    target = out_ptr + batch * out_stride_b + head.to(tl.int64) * out_stride_h + (rows % width) * out_stride_w
    inside = row_ok[:, None] & dim_ok[None, :]
    tl.store(target[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)


def block_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pattern: CachePattern,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Attention of w queries per row over a static cache.

    q [batch, heads, w, dim], head dimension contiguous; keys, values [batch, kv_heads, length, dim], the caches, with
    the queries' own already written; pattern: who sees whom. softcap: cap * tanh(score / cap). sinks [heads]: logit of
    a key without value (attention sinks, arXiv 2309.17453, as gpt-oss learns them). Values of another width than keys
    have no kernel: `masked_attention` computes them everywhere. tiling: rows (queries of a tile, from 16 on), columns
    (keys of one), splits (programs that share a context, a power of two), warps, stages; None: as `attention_tiling`
    says. Results are bitwise comparable only between calls with the same splits and width. dtype bf16, fp16 or fp32
    (accumulation in fp32). Returns [batch, heads, w, dim] in q's dtype, laid out as [batch, w, heads, dim].

    Raises `ValueError` for shapes, dtypes or splits that do not fit.
    """
    if not uses_kernels(q) or values.shape[-1] != q.shape[-1]:
        return masked_attention(q, keys, values, pattern, scale=scale, softcap=softcap, sinks=sinks)
    batch, heads, width, dim = q.shape
    kv_heads, start, ancestors = keys.shape[1], pattern.start, pattern.ancestors
    tiling = tiling or attention_tiling(q, kv_heads)
    _check(q, keys, values, pattern, tiling.splits)
    groups, splits = heads // kv_heads, tiling.splits
    rows, block_d = groups * width, _padded(dim)

    # Heads innermost but one, as a projection that follows reads it.
    out = q.new_empty(batch, width, heads, dim).transpose(1, 2)
    split = splits > 1
    partial = q.new_empty(batch * kv_heads, splits, rows, dim, dtype=torch.float32) if split else out
    lse = q.new_empty(batch * kv_heads, splits, rows, dtype=torch.float32) if split else out
    shape = {
        "KV_HEADS": kv_heads, "GROUPS": groups, "DIM": dim, "BLOCK_D": block_d, "SPLITS": splits,
        "HAS_SINKS": sinks is not None,
    }  # fmt: skip
    overlap = overlapping(q.device)
    sinks = q if sinks is None else sinks
    _attend_kernel[(batch * kv_heads, splits, triton.cdiv(rows, tiling.rows))](
        q, keys, values, start, start if ancestors is None else ancestors.contiguous(), sinks, partial, lse, out,
        *outer_strides(q, keys, values), *position_strides(start), *outer_strides(out),
        LOG2_E if softcap is not None else scale * LOG2_E, scale, softcap or 0.0, width,
        STEP=1 if start.dim() == 1 else 0, BLOCK_M=tiling.rows, BLOCK_N=tiling.columns, CAUSAL=pattern.causal,
        TREE=ancestors is not None, WINDOW=pattern.window or 0, HAS_CAP=softcap is not None,
        num_warps=tiling.warps, num_stages=tiling.stages, **shape, **overlap,
    )  # fmt: skip
    if split:
        block_r = max(1, 4096 // (splits * block_d))
        _join_kernel[(batch * kv_heads, triton.cdiv(rows, block_r))](
            partial, lse, sinks, out, *outer_strides(out), width, BLOCK_R=block_r, num_warps=4, **shape, **overlap,
        )  # fmt: skip
    return out


def attention_tiling(q: Tensor, kv_heads: int) -> Tiling:
    """The tiling of `block_attention` for queries [batch, heads, w, dim] over `kv_heads` heads of keys."""
    batch, heads, width, dim = q.shape
    rows, block_d, wide = heads // kv_heads * width, _padded(dim), q.dtype == torch.float32
    block_m = 16 if wide else max(16, min(128, triton.next_power_of_2(rows)))
    # fp32 products are unrolled multiply-adds: small tiles keep them in registers.
    block_n = (16 if wide else 32) if block_d >= 256 else (32 if wide else 64)
    # A large tile computes long enough on each tile of keys to have the next one there in time.
    fits = (block_m + 3 * 2 * block_n) * block_d * q.element_size() <= shared_memory(q.device)
    return Tiling(
        rows=block_m,
        columns=block_n,
        splits=split_count(batch * kv_heads * triton.cdiv(rows, block_m), block_m),
        warps=8 if block_m == 128 else 4,
        stages=3 if block_m < 128 and fits else 2,
    )


def _padded(dim: int) -> int:
    """Channels that a head has in a kernel."""
    return max(16, triton.next_power_of_2(dim))


def split_count(programs: int, rows: int) -> int:
    """How many programs share a context, where `programs` tiles of `rows` queries each are at work: a power of two.

    Enough to give every multiprocessor of a large device one program of a large tile, or several of a small one, which
    mostly wait for memory. Each one's results, rows x dim in fp32, are written and read again, and joining them takes
    a launch: where half of the multiprocessors have work without it, that costs more than the other half would save.
    Depends on shapes only."""
    enough, wanted = (128, 512) if rows <= 16 else (64, 128)
    if programs >= enough:
        return 1
    return min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(wanted, programs)))


def _check(q: Tensor, keys: Tensor, values: Tensor, pattern: CachePattern, splits: int) -> None:
    batch, heads, width, dim = q.shape
    start = pattern.start
    if keys.shape != values.shape or keys.shape[0] != batch or keys.shape[3] != dim:
        raise ValueError(f"cache shapes {tuple(keys.shape)}, {tuple(values.shape)} do not fit q {tuple(q.shape)}")
    if heads % keys.shape[1]:
        raise ValueError(f"{heads} query heads are not a multiple of {keys.shape[1]} key/value heads")
    if q.dtype not in DTYPES.values() or keys.dtype != q.dtype or values.dtype != q.dtype:
        raise ValueError(f"dtypes {q.dtype}, {keys.dtype}, {values.dtype}: all must be one of bf16, fp16, fp32")
    if q.stride(3) != 1 or keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError("the head dimension of q and of the caches must be contiguous")
    if start.shape not in ((batch,), (batch, width)):
        raise ValueError(f"start must be [{batch}] or [{batch}, {width}], got shape {tuple(start.shape)}")
    if splits not in (1, 2, 4, 8, 16, MAX_SPLITS):
        raise ValueError(f"splits must be a power of two up to {MAX_SPLITS}, got {splits}")
    if pattern.ancestors is not None:
        _check_tree(q, pattern, pattern.ancestors)


def _check_tree(q: Tensor, pattern: CachePattern, ancestors: Tensor) -> None:
    batch, _, width, _ = q.shape
    start = pattern.start
    if ancestors.shape != (batch, width) or ancestors.dtype != torch.int64 or start.shape != (batch, width):
        raise ValueError(
            f"a tree needs ancestors (int64) and start of shape [{batch}, {width}], got {ancestors.dtype} "
            f"{tuple(ancestors.shape)} and {tuple(start.shape)}"
        )
    if width > MAX_TREE or not pattern.causal:
        raise ValueError(
            f"a tree has at most {MAX_TREE} queries and is causal, got {width} and causal={pattern.causal}"
        )
