"""Attention of a few query tokens per row against a static key/value cache, for decoding.

`block_attention` takes w consecutive query positions of every row (a verify's tokens, or the slots of a draft block),
whose own keys and values already stand in the cache, and attends over what each query may see. It reads the row's
first position on the device, so one CUDA graph serves every length, and only visible cache entries are read: time
grows with the row's length, not with the cache's.

The kernel packs the w queries of all query heads that share a key/value head into one tile (GQA), splits the context
into chunks at *absolute* positions and joins the chunks in a second launch. Chunk edges do not depend on where the
block starts, and a masked key adds an exact zero, so a query gives bitwise the same result from any slot of a block
and beside any neighbours: that is what makes speculative and plain decoding comparable bit for bit in bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_QUERIES = 32
"""Most query tokens a row may bring."""


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
    queries = start[:, None] + torch.arange(width, device=start.device)
    if causal:
        visible = keys <= queries[..., None]
    else:
        visible = (keys < start[:, None, None] + width).expand(-1, width, -1)
    if window is not None:
        visible = visible & (queries[..., None] - keys < window) & (keys - queries[..., None] < window)
    return visible


@triton.jit
def _chunk_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, start_ptr, partial_ptr, lse_ptr,
    q_stride_b, q_stride_h, q_stride_w, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    scale, softcap, num_chunks,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0)
    chunk = tl.program_id(1)
    tile = tl.program_id(2)
    batch = (row_head // KV_HEADS).to(tl.int64)
    kv_head = row_head % KV_HEADS
    start = tl.load(start_ptr + batch).to(tl.int32)
    end = start + WIDTH

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < GROUPS * WIDTH
    slot = rows % WIDTH
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DIM
    # Results of one chunk: [batch * kv_heads, chunks, GROUPS * WIDTH (, DIM)]
    base = (row_head.to(tl.int64) * num_chunks + chunk) * (GROUPS * WIDTH)

    first = 0
    if WINDOW > 0:
        first = tl.maximum(start - (WINDOW - 1), 0)
    low = chunk * CHUNK
    high = tl.minimum(low + CHUNK, end)
    if (low >= end) | (high <= first):
        tl.store(lse_ptr + base + rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_ok)
        return

    q_offset = batch * q_stride_b + (kv_head * GROUPS + rows // WIDTH) * q_stride_h + slot * q_stride_w
    q = tl.load(q_ptr + q_offset[:, None] + dims[None, :], mask=row_ok[:, None] & dim_ok[None, :], other=0.0)
    query_position = start + slot

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for offset in range(0, CHUNK, BLOCK_N):
        if (low + offset < high) & (low + offset + BLOCK_N > first):
            keys = low + offset + tl.arange(0, BLOCK_N)
            key_ok = (keys < end) & (keys >= first)
            load_ok = key_ok[:, None] & dim_ok[None, :]
            k_offset = batch * k_stride_b + kv_head * k_stride_h + keys.to(tl.int64)[:, None] * k_stride_n
            k = tl.load(k_ptr + k_offset + dims[None, :], mask=load_ok, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if HAS_CAP:
                # tanh(x) = 1 - 2 / (exp(2x) + 1): saturates without overflow trouble at either end.
                scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
            distance = query_position[:, None] - keys[None, :]
            visible = key_ok[None, :] & row_ok[:, None]
            if CAUSAL:
                visible = visible & (distance >= 0)
            if WINDOW > 0:
                visible = visible & (distance < WINDOW) & (-distance < WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            # A row that has seen nothing yet keeps a finite reference, so that no inf - inf arises.
            reference = tl.where(new_best == float("-inf"), 0.0, new_best)
            weights = tl.exp(scores - reference[:, None])
            decay = tl.exp(best - reference)
            v_offset = batch * v_stride_b + kv_head * v_stride_h + keys.to(tl.int64)[:, None] * v_stride_n
            v = tl.load(v_ptr + v_offset + dims[None, :], mask=load_ok, other=0.0)
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            best = new_best

    seen = total > 0.0
    divisor = tl.where(seen, total, 1.0)
    lse = tl.where(seen, best + tl.log(divisor), float("-inf"))
    tl.store(lse_ptr + base + rows, lse, mask=row_ok)
    target = partial_ptr + (base + rows)[:, None] * DIM + dims[None, :]
    tl.store(target, acc / divisor[:, None], mask=row_ok[:, None] & dim_ok[None, :])


@triton.jit
def _join_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, lse_ptr, start_ptr, sinks_ptr, out_ptr,
    out_stride_b, out_stride_h, out_stride_w, num_chunks,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0)
    row = tl.program_id(1)
    batch = (row_head // KV_HEADS).to(tl.int64)
    head = (row_head % KV_HEADS) * GROUPS + row // WIDTH
    end = tl.load(start_ptr + batch).to(tl.int32) + WIDTH
    live = tl.minimum((end + CHUNK - 1) // CHUNK, num_chunks)
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < DIM

    best = float("-inf")
    if HAS_SINKS:
        best = tl.load(sinks_ptr + head).to(tl.float32)
    total = tl.where(best == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, live, BLOCK_C):
        chunks = first + tl.arange(0, BLOCK_C)
        index = (row_head.to(tl.int64) * num_chunks + chunks) * (GROUPS * WIDTH) + row
        lse = tl.load(lse_ptr + index, mask=chunks < live, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(lse, 0))
        reference = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp(lse - reference)
        decay = tl.exp(best - reference)
        read = (lse > float("-inf"))[:, None] & dim_ok[None, :]
        partial = tl.load(partial_ptr + index[:, None] * DIM + dims[None, :], mask=read, other=0.0)
        acc = acc * decay + tl.sum(weights[:, None] * partial, 0)
        total = total * decay + tl.sum(weights, 0)
        best = new_best
    target = out_ptr + batch * out_stride_b + head * out_stride_h + (row % WIDTH) * out_stride_w
    tl.store(target + dims, (acc / total).to(out_ptr.dtype.element_ty), mask=dim_ok)


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
    chunk: int = 128,
) -> Tensor:
    """Attention of w queries per row over a static cache.

    q [batch, heads, w, dim], w <= 32, head dimension contiguous; k_cache, v_cache [batch, kv_heads, length, dim] with
    the queries' own keys and values already written; start [batch] int, the position of each row's first query (query
    i stands at start + i). causal: query i sees positions <= start + i; otherwise all positions < start + w (a block
    that sees itself both ways). window W: only positions nearer than W. softcap: cap * tanh(score / cap). sinks
    [heads]: logit of a key without value. limit: no row's start + w exceeds it (a bound the host knows; launches
    fewer chunks); chunk: context positions per program, a multiple of 64; results are bitwise comparable only between
    calls with the same chunk. dtype bf16, fp16 or fp32 (accumulation in fp32). Returns [batch, heads, w, dim] in q's
    dtype.
    """
    batch, heads, width, dim = q.shape
    kv_heads, length = k_cache.shape[1], k_cache.shape[2]
    _check(q, k_cache, v_cache, start, chunk)
    groups = heads // kv_heads
    num_chunks = triton.cdiv(length if limit is None else min(limit, length), chunk)
    rows = groups * width
    block_m = max(16, min(64 if q.dtype == torch.float32 else 128, triton.next_power_of_2(rows)))
    block_d = max(16, triton.next_power_of_2(dim))
    block_n = 32 if q.dtype == torch.float32 or block_d >= 256 else 64

    partial = q.new_empty(batch * kv_heads, num_chunks, rows, dim, dtype=torch.float32)
    lse = q.new_empty(batch * kv_heads, num_chunks, rows, dtype=torch.float32)
    # Heads innermost but one, as a projection that follows reads it.
    out = q.new_empty(batch, width, heads, dim).transpose(1, 2)
    shape = {"KV_HEADS": kv_heads, "GROUPS": groups, "WIDTH": width, "DIM": dim, "BLOCK_D": block_d, "CHUNK": chunk}
    _chunk_kernel[(batch * kv_heads, num_chunks, triton.cdiv(rows, block_m))](
        q, k_cache, v_cache, start, partial, lse,
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
        scale, softcap or 0.0, num_chunks,
        BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal, WINDOW=window or 0, HAS_CAP=softcap is not None,
        num_warps=8 if block_m == 128 else 4, num_stages=2, **shape,
    )  # fmt: skip
    _join_kernel[(batch * kv_heads, rows)](
        partial, lse, start, lse if sinks is None else sinks, out, *out.stride()[:3], num_chunks,
        BLOCK_C=16, HAS_SINKS=sinks is not None, num_warps=4, **shape,
    )  # fmt: skip
    return out


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, chunk: int) -> None:
    batch, heads, width, dim = q.shape
    if not 1 <= width <= MAX_QUERIES:
        raise ValueError(f"block_attention takes 1 to {MAX_QUERIES} query tokens per row, got {width}")
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
    if start.shape != (batch,):
        raise ValueError(f"start must have one entry a row ({batch}), got shape {tuple(start.shape)}")
    if chunk % 64:
        raise ValueError(f"chunk must be a multiple of 64, got {chunk}")
