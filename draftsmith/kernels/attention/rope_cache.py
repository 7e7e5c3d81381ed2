"""From one joined q/k/v projection to normed, rotated queries, and keys and values in the cache, in one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.kernels.device import overlapping, uses_kernels
from draftsmith.kernels.layers.rms_norm import plain_norm
from draftsmith.kernels.strides import outer_strides, position_strides
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.triton import tl, triton


class HeadNorms(NamedTuple):
    """The RMS norms of a layer's query heads and key heads: weights [dim] each, eps, and whether they scale by 1 +
    weight (Gemma)."""

    q: Tensor
    k: Tensor
    eps: float
    unit_offset: bool = False


def rope_cache_reference(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    start: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    heads: int,
    norms: HeadNorms | None,
    places: Tensor | None = None,
) -> Tensor:
    """Plain PyTorch for `rope_cache` (writes the caches in place, returns q)."""
    cos, sin = angles
    keys, values = cache
    if qkv.dim() == 4:
        qkv = qkv.sum(0).to(keys.dtype)
    batch, width, _ = qkv.shape
    kv_heads, dim = keys.shape[1], keys.shape[3]
    positions = start if start.dim() == 2 else start[:, None] + torch.arange(width, device=qkv.device)
    if cos.dim() == 2:
        cos, sin = cos[positions], sin[positions]
    split = qkv.view(batch, width, heads + 2 * kv_heads, dim)
    q, k, v = split[:, :, :heads], split[:, :, heads : heads + kv_heads], split[:, :, heads + kv_heads :]
    if norms is not None:
        q = plain_norm(q, norms.q, norms.eps, norms.unit_offset)
        k = plain_norm(k, norms.k, norms.eps, norms.unit_offset)
    q, k = (_rotate(t, cos, sin) for t in (q, k))
    rows = torch.arange(batch, device=qkv.device)[:, None]
    places = positions if places is None else places
    keys[rows, :, places] = k
    values[rows, :, places] = v
    return q.transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As the targets' code rotates, each product rounded; beside the drafts' own `rotate` for the reason that
    `plain_norm` gives."""
    rotary = cos.shape[-1]
    turned, kept = x[..., :rotary], x[..., rotary:]
    low, high = turned.chunk(2, -1)
    cos, sin = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype)
    return torch.cat([turned * cos + torch.cat([-high, low], -1) * sin, kept], -1)


@triton.jit
def _summed(source, offsets, inside, split_stride, SPLITS: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The projection's value, whole or as addends, rounded to the model's dtype."""
    value = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(source + split * split_stride + offsets, mask=inside, other=0.0)
    return value.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["width"])  # one program for prompts of any length
def _rope_cache_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, cos_ptr, sin_ptr, position_ptr, place_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_ptr, v_ptr,
    qkv_stride_b, qkv_stride_w, split_stride, cos_stride_b, cos_stride_w, position_stride_b, position_stride_w,
    k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, eps, width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, BLOCK_H: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr, TABLE: tl.constexpr,
    HAS_PLACES: tl.constexpr, HAS_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_query = heads < HEADS
    is_key = (heads >= HEADS) & (heads < HEADS + KV_HEADS)
    is_value = (heads >= HEADS + KV_HEADS) & (heads < HEADS + 2 * KV_HEADS)
    batch = (token // width).to(tl.int64)
    slot = token % width
    position = tl.load(position_ptr + batch * position_stride_b + slot * position_stride_w).to(tl.int64) + slot * STEP
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    source = qkv_ptr + batch * qkv_stride_b + slot * qkv_stride_w + heads[:, None] * DIM

    # A rotated dimension's partner lies half the rotary width away: both halves are read as rows of their own, in full
    # width, and the dimensions that are not rotated after them.
    half: tl.constexpr = ROTARY // 2
    dims = tl.arange(0, BLOCK)
    half_ok = (dims < half)[None, :] & (is_query | is_key | is_value)[:, None]
    raw_low = _summed(source, dims[None, :], half_ok, split_stride, SPLITS, dtype)
    raw_high = _summed(source, half + dims[None, :], half_ok, split_stride, SPLITS, dtype)
    low = raw_low
    high = raw_high
    rest_dims = ROTARY + tl.arange(0, REST)
    rest_ok = (rest_dims < DIM)[None, :] & (is_query | is_key | is_value)[:, None]
    if ROTARY < DIM:
        raw_rest = _summed(source, rest_dims[None, :], rest_ok, split_stride, SPLITS, dtype)
        rest = raw_rest
    if HAS_NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if ROTARY < DIM:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        low = _normed(low, scale, q_weight_ptr, k_weight_ptr, dims, dims < half, is_query, UNIT_OFFSET, dtype)
        high = _normed(high, scale, q_weight_ptr, k_weight_ptr, half + dims, dims < half, is_query, UNIT_OFFSET, dtype)
        if ROTARY < DIM:
            rest = _normed(
                rest, scale, q_weight_ptr, k_weight_ptr, rest_dims, rest_dims < DIM, is_query, UNIT_OFFSET, dtype
            )
    if TABLE:
        table = position * cos_stride_w + dims
    else:
        table = batch * cos_stride_b + slot * cos_stride_w + dims
    cos = tl.load(cos_ptr + table, mask=dims < half, other=1.0).to(dtype).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + table, mask=dims < half, other=0.0).to(dtype).to(tl.float32)[None, :]
    # Each product is rounded before the sum, as the model's own code does.
    out_low = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    out_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)

    place = position
    if HAS_PLACES:
        place = tl.load(place_ptr + token).to(tl.int64)
    q_to = q_ptr + (token.to(tl.int64) * HEADS + heads)[:, None] * DIM
    k_to = k_ptr + batch * k_stride_b + place * k_stride_n + (heads - HEADS).to(tl.int64)[:, None] * k_stride_h
    v_head = (heads - HEADS - KV_HEADS).to(tl.int64)[:, None]
    v_to = v_ptr + batch * v_stride_b + place * v_stride_n + v_head * v_stride_h
    _store(q_to, k_to, v_to, dims[None, :], out_low, raw_low, half_ok, is_query, is_key, is_value, dtype)
    _store(q_to, k_to, v_to, half + dims[None, :], out_high, raw_high, half_ok, is_query, is_key, is_value, dtype)
    if ROTARY < DIM:
        _store(q_to, k_to, v_to, rest_dims[None, :], rest, raw_rest, rest_ok, is_query, is_key, is_value, dtype)


@triton.jit
def _normed(  # type: ignore[no-untyped-def]
    x, scale, q_weight_ptr, k_weight_ptr, dims, inside, is_query, UNIT_OFFSET: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Some dimensions of each head [heads, dims], scaled and weighted."""
    of_query = tl.load(q_weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(k_weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    weight = tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
    if UNIT_OFFSET:
        out = (x * scale * (1.0 + weight)).to(dtype)
    else:
        out = ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype)
    return out.to(tl.float32)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    q_to, k_to, v_to, dims, rotated, raw, inside, is_query, is_key, is_value, dtype: tl.constexpr
):  # fmt: skip
    """Queries and keys as they were rotated, values as they came."""
    tl.store(q_to + dims, rotated.to(dtype), mask=inside & is_query[:, None])
    tl.store(k_to + dims, rotated.to(dtype), mask=inside & is_key[:, None])
    tl.store(v_to + dims, raw.to(dtype), mask=inside & is_value[:, None])


def rope_cache(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    start: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    heads: int,
    norms: HeadNorms | None,
    places: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Norms and rotates queries and keys, and writes keys and values to the cache.

    qkv [batch, w, (heads + 2 kv_heads) * dim], q first, then k, then v, or [S, batch, w, ...] fp32, S addends of it
    (`skinny_linear`). angles: cosines and sines [batch or 1, w, rotary] of these tokens, or tables [positions, rotary]
    of all, the two halves alike (Hugging Face's convention), rotary <= dim. start [batch] int, position of each row's
    first token, or [batch, w] int, the position of every token, which is also where its key and value go, unless places
    [batch, w] int says otherwise. cache: keys and values [batch, kv_heads, length, dim], written in place. tiling: rows
    (heads of a program); None: chosen by the number of tokens. Returns q [batch, heads, w, dim] in the caches' dtype.
    Raises `ValueError` for shapes that do not fit.
    """
    if not uses_kernels(qkv):
        return rope_cache_reference(qkv, angles, start, cache, heads=heads, norms=norms, places=places)
    cos, sin = angles
    keys, values = cache
    splits = qkv.shape[0] if qkv.dim() == 4 else 1
    batch, width, _ = qkv.shape[-3:]
    kv_heads, dim = keys.shape[1], keys.shape[3]
    if qkv.shape[-1] != (heads + 2 * kv_heads) * dim or qkv.stride(-1) != 1:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not hold {heads} + 2 x {kv_heads} heads of {dim} contiguously")
    table = cos.dim() == 2
    if not table:
        cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        raise ValueError("cosines and sines must be laid out alike, with the rotary dimension contiguous")
    rotary = cos.shape[-1]
    q = torch.empty(batch, width, heads, dim, dtype=keys.dtype, device=qkv.device)
    total_heads = heads + 2 * kv_heads
    # One head a program while programs are few; then several, so that starting programs does not take the time.
    block_h = tiling.rows if tiling else 1 if batch * width * total_heads <= 2048 else 16
    q_weight, k_weight, eps, unit_offset = norms or (qkv, qkv, 0.0, False)  # what is not read
    _rope_cache_kernel[(batch * width, triton.cdiv(total_heads, block_h))](
        qkv, cos, sin, start, qkv if places is None else places.contiguous(), q_weight, k_weight, q, keys, values,
        qkv.stride(-3), qkv.stride(-2), qkv.stride(0), 0 if table else cos.stride(0), cos.stride(-2),
        *position_strides(start), *outer_strides(keys, values), eps, width,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, ROTARY=rotary, BLOCK=triton.next_power_of_2(rotary // 2),
        REST=triton.next_power_of_2(max(1, dim - rotary)), STEP=1 if start.dim() == 1 else 0, SPLITS=splits,
        TABLE=table, HAS_PLACES=places is not None, HAS_NORM=norms is not None, UNIT_OFFSET=unit_offset,
        BLOCK_H=block_h, num_warps=1 if block_h == 1 else 4, **overlapping(q.device),
    )  # fmt: skip
    return q.transpose(1, 2)
