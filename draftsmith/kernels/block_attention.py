"""Attention of consecutive query tokens per row against a static key/value cache, for decoding and for prefill.

`block_attention` takes w query tokens of every row (a verify's tokens, the slots of a draft block, a chunk of a
prompt), whose own keys and values already stand in the cache, and attends over what each query may see. It reads
positions on the device, so one CUDA graph serves every length, and only visible cache entries are read: time grows
with the row's length, not with the cache's.

The kernel packs the queries of all query heads that share a key/value head into tiles (GQA). Few queries: the context
is split into chunks at *absolute* positions, joined in a second launch. Many queries fill the device by themselves and
read their context in one go. Chunk edges depend neither on where the block starts nor on the cache's length, and a
masked key adds an exact zero, so a query gives bitwise the same result from any slot of a block, beside any neighbours
and in any context bucket: that is what makes speculative and plain decoding comparable bit for bit in bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.kernels.overlap import overlapping

MAX_SPLIT_QUERIES = 32
"""Most query tokens a row may bring for its context to be split over several programs."""

_LOG2E = 1.4426950408889634


def block_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Plain PyTorch for `block_attention`, in fp32. Same arguments, same result up to rounding."""
    batch, heads, width, dim = q.shape
    groups = heads // k_cache.shape[1]
    visible = _visible(start, width, k_cache.shape[2], causal, window)  # [batch, width, length]
    # Entries that nobody may see can hold anything, NaN included.
    seen = visible.any(1)[:, None, :, None]
    keys = k_cache.float().masked_fill(~seen, 0.0).repeat_interleave(groups, 1)
    values = v_cache.float().masked_fill(~seen, 0.0).repeat_interleave(groups, 1)
    scores = (q.float() @ keys.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, heads, 1, 1).expand(batch, heads, width, 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k_cache.shape[2]]
    return (weights @ values).to(q.dtype)


def _visible(start: Tensor, width: int, length: int, causal: bool, window: int | None) -> Tensor:
    """Which cache positions each query sees: [batch, width, length] bool."""
    keys = torch.arange(length, device=start.device)
    queries = start if start.dim() == 2 else start[:, None] + torch.arange(width, device=start.device)
    if causal:
        visible = keys <= queries[..., None]
    else:
        visible = (keys <= queries[:, -1:, None]).expand(-1, width, -1)
    if window is not None:
        visible = visible & (queries[..., None] - keys < window) & (keys - queries[..., None] < window)
    return visible


@triton.jit
def _chunk_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, position_ptr, partial_ptr, lse_ptr, out_ptr,
    q_stride_b, q_stride_h, q_stride_w, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    position_stride_b, position_stride_w, out_stride_b, out_stride_h, out_stride_w,
    scale, softcap, num_chunks, chunk_size, width,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0)
    chunk = tl.program_id(1)
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
    # Keys from `first` to `end` are all that any query of this tile sees.
    if CAUSAL:
        end = tl.max(tl.where(row_ok, query_position, -1), 0) + 1
    else:
        end = tl.load(positions + (width - 1) * position_stride_w).to(tl.int32) + (width - 1) * STEP + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.min(tl.where(row_ok, query_position, 2147483647), 0) - (WINDOW - 1), 0)
    low = tl.maximum(chunk * chunk_size, first // BLOCK_N * BLOCK_N)
    high = tl.minimum((chunk + 1) * chunk_size, end)

    # Results of one chunk: [batch * kv_heads, chunks, GROUPS * width (, DIM)]
    base = (row_head.to(tl.int64) * num_chunks + chunk) * (GROUPS * width)
    if SPLIT and (low >= high):
        tl.store(lse_ptr + base + rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_ok)
        return

    q_offset = (kv_head * GROUPS + rows // width).to(tl.int64) * q_stride_h + slot.to(tl.int64) * q_stride_w
    q_from = q_ptr + batch * q_stride_b + q_offset
    q = tl.load(q_from[:, None] + dims[None, :], mask=row_ok[:, None] & dim_ok[None, :], other=0.0)
    k_from = k_ptr + batch * k_stride_b + kv_head.to(tl.int64) * k_stride_h
    v_from = v_ptr + batch * v_stride_b + kv_head.to(tl.int64) * v_stride_h

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for offset in range(low, high, BLOCK_N):
        keys = offset + tl.arange(0, BLOCK_N)
        # Nothing past the last query is read: what stale entries hold must not matter, not even a NaN.
        load_ok = (keys < end)[:, None] & dim_ok[None, :]
        k = tl.load(k_from + keys[:, None] * k_stride_n + dims[None, :], mask=load_ok, other=0.0)
        v = tl.load(v_from + keys[:, None] * v_stride_n + dims[None, :], mask=load_ok, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # in powers of two, unless capped
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1): saturates without overflow trouble at either end.
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0)) * 1.4426950408889634
        distance = query_position[:, None] - keys[None, :]
        visible = (keys < end)[None, :] & row_ok[:, None]
        if CAUSAL:
            visible = visible & (distance >= 0)
        if WINDOW > 0:
            visible = visible & (distance < WINDOW) & (-distance < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet keeps a finite reference, so that no inf - inf arises.
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(best - reference)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best

    seen = total > 0.0
    divisor = tl.where(seen, total, 1.0)
    result = acc / divisor[:, None]
    inside = row_ok[:, None] & dim_ok[None, :]
    if SPLIT:
        lse = tl.where(seen, best + tl.log2(divisor), float("-inf"))
        tl.store(lse_ptr + base + rows, lse, mask=row_ok)
        tl.store(partial_ptr + (base + rows)[:, None] * DIM + dims[None, :], result, mask=inside)
    else:
        out_offset = (kv_head * GROUPS + rows // width).to(tl.int64) * out_stride_h + slot.to(tl.int64) * out_stride_w
        out_from = out_ptr + batch * out_stride_b + out_offset
        tl.store(out_from[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _join_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, lse_ptr, position_ptr, sinks_ptr, out_ptr,
    position_stride_b, position_stride_w, out_stride_b, out_stride_h, out_stride_w, num_chunks, chunk_size, width,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch = (row_head // KV_HEADS).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = rows < GROUPS * width
    head = (row_head % KV_HEADS) * GROUPS + rows // width
    last = tl.load(position_ptr + batch * position_stride_b + (width - 1) * position_stride_w).to(tl.int32)
    live = tl.minimum((last + (width - 1) * STEP) // chunk_size + 1, num_chunks)
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DIM

    best = tl.full([BLOCK_R], float("-inf"), tl.float32)
    if HAS_SINKS:
        best = tl.load(sinks_ptr + head, mask=row_ok, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    total = tl.where(best == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for first in range(0, live, BLOCK_C):
        chunks = first + tl.arange(0, BLOCK_C)
        index = (row_head.to(tl.int64) * num_chunks + chunks[:, None]) * (GROUPS * width) + rows[None, :]
        there = (chunks < live)[:, None] & row_ok[None, :]
        lse = tl.load(lse_ptr + index, mask=there, other=float("-inf"))  # [BLOCK_C, BLOCK_R]
        new_best = tl.maximum(best, tl.max(lse, 0))
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(lse - reference[None, :])
        decay = tl.exp2(best - reference)
        read = (lse > float("-inf"))[:, :, None] & dim_ok[None, None, :]
        partial = tl.load(partial_ptr + index[:, :, None] * DIM + dims[None, None, :], mask=read, other=0.0)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * partial, 0)
        total = total * decay + tl.sum(weights, 0)
        best = new_best
    result = acc / tl.where(row_ok, total, 1.0)[:, None]
    target = out_ptr + batch * out_stride_b + head.to(tl.int64) * out_stride_h + (rows % width) * out_stride_w
    inside = row_ok[:, None] & dim_ok[None, :]
    tl.store(target[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)


def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    limit: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Attention of w queries per row over a static cache.

    q [batch, heads, w, dim], head dimension contiguous; k_cache, v_cache [batch, kv_heads, length, dim] with the
    queries' own keys and values already written; start [batch] int, the position of each row's first query (query i
    stands at start + i), or [batch, w] int, the position of every query (none below the one before it). causal: a
    query sees keys at positions up to its own; otherwise up to the row's last query (a block that sees itself both
    ways). window W: only positions nearer than W. softcap: cap * tanh(score / cap). sinks [heads]: logit of a key
    without value. limit: no query's position reaches it (a bound the host knows; launches fewer chunks); chunk:
    context positions per program, a multiple of 64, chosen by the shape of q if not given; results are bitwise
    comparable only between calls with the same chunk and width. dtype bf16, fp16 or fp32 (accumulation in fp32).
    Returns [batch, heads, w, dim] in q's dtype, laid out as [batch, w, heads, dim].

    Raises `ValueError` for shapes, dtypes or chunks that do not fit.
    """
    batch, heads, width, dim = q.shape
    kv_heads, length = k_cache.shape[1], k_cache.shape[2]
    _check(q, k_cache, v_cache, start, sinks, chunk)
    groups = heads // kv_heads
    rows = groups * width
    length = length if limit is None else min(limit, length)
    split = width <= MAX_SPLIT_QUERIES
    wide = q.dtype == torch.float32
    block_m = 16 if wide else max(16, min(128, triton.next_power_of_2(rows)))
    block_d = max(16, triton.next_power_of_2(dim))
    # fp32 products are unrolled multiply-adds: small tiles keep them in registers.
    block_n = (16 if wide else 32) if block_d >= 256 else (32 if wide else 64)
    tiles = triton.cdiv(rows, block_m)
    chunk = (chunk or split_size(batch * kv_heads * tiles, rows)) if split else triton.cdiv(length, 64) * 64
    num_chunks = triton.cdiv(length, chunk)

    # Heads innermost but one, as a projection that follows reads it.
    out = q.new_empty(batch, width, heads, dim).transpose(1, 2)
    partial = q.new_empty(batch * kv_heads, num_chunks, rows, dim, dtype=torch.float32) if split else out
    lse = q.new_empty(batch * kv_heads, num_chunks, rows, dtype=torch.float32) if split else out
    position_strides = (start.stride(0), start.stride(1) if start.dim() == 2 else 0)
    overlap = overlapping(q.device)
    shape = {
        "KV_HEADS": kv_heads, "GROUPS": groups, "DIM": dim, "BLOCK_D": block_d, "STEP": 1 if start.dim() == 1 else 0,
    }  # fmt: skip
    _chunk_kernel[(batch * kv_heads, num_chunks, tiles)](
        q, k_cache, v_cache, start, partial, lse, out,
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], *position_strides, *out.stride()[:3],
        scale if softcap is not None else scale * _LOG2E, softcap or 0.0, num_chunks, chunk, width,
        BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal, WINDOW=window or 0, HAS_CAP=softcap is not None, SPLIT=split,
        num_warps=8 if block_m == 128 else 4, num_stages=2, **shape, **overlap,
    )  # fmt: skip
    if split:
        block_r, block_c = join_tile(batch * kv_heads * rows, block_d)
        _join_kernel[(batch * kv_heads, triton.cdiv(rows, block_r))](
            partial, lse, start, lse if sinks is None else sinks, out, *position_strides, *out.stride()[:3],
            num_chunks, chunk, width, BLOCK_C=block_c, BLOCK_R=block_r,
            HAS_SINKS=sinks is not None, num_warps=4, **shape, **overlap,
        )  # fmt: skip
    return out


def split_size(programs: int, rows: int) -> int:
    """Context positions per program, where `programs` of them (rows x heads) work on each chunk, with `rows` queries
    of a row and key head: fine enough to fill the device with few rows, coarse enough that the chunks' results, rows x
    dim each, stay small beside the keys and values that they come from. Depends on shapes only."""
    if programs <= 16:
        return 64 if rows <= 16 else 128
    if programs <= 128:
        return 256 if rows <= 16 else 512
    return 512 if rows <= 16 else 1024


def join_tile(rows: int, block_d: int) -> tuple[int, int]:
    """(rows, chunks) that one program of the join reads at once: all chunks of one row where rows are few, so that it
    waits for memory once; several rows where they are many."""
    if rows <= 1024:
        return 1, 8192 // block_d
    block_r = 4 if rows <= 8192 else 8
    return block_r, max(1, 4096 // (block_r * block_d))


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, sinks: Tensor | None, chunk: int | None) -> None:
    batch, heads, width, dim = q.shape
    if sinks is not None and width > MAX_SPLIT_QUERIES:
        raise ValueError(f"sinks are known for up to {MAX_SPLIT_QUERIES} query tokens per row, got {width}")
    if k_cache.shape != v_cache.shape or k_cache.shape[0] != batch or k_cache.shape[3] != dim:
        raise ValueError(f"cache shapes {tuple(k_cache.shape)}, {tuple(v_cache.shape)} do not fit q {tuple(q.shape)}")
    if heads % k_cache.shape[1]:
        raise ValueError(f"{heads} query heads are not a multiple of {k_cache.shape[1]} key/value heads")
    if (
        q.dtype not in (torch.bfloat16, torch.float16, torch.float32)
        or k_cache.dtype != q.dtype
        or v_cache.dtype != q.dtype
    ):
        raise ValueError(f"dtypes {q.dtype}, {k_cache.dtype}, {v_cache.dtype}: all must be one of bf16, fp16, fp32")
    if q.stride(3) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("the head dimension of q and of the caches must be contiguous")
    if start.shape not in ((batch,), (batch, width)):
        raise ValueError(f"start must be [{batch}] or [{batch}, {width}], got shape {tuple(start.shape)}")
    if chunk is not None and (chunk < 64 or chunk % 64):
        raise ValueError(f"chunk must be a multiple of 64, got {chunk}")
