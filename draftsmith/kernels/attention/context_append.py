"""What a draft keeps of verified tokens, for all its layers in one launch: norm and rotation of the keys, and the way
into the cache."""

import torch
from torch import Tensor

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.layers.rms_norm import plain_norm
from draftsmith.kernels.triton import tl, triton


def context_append_reference(
    keys_values: Tensor, k_weights: Tensor, rope_table: Tensor, start: Tensor, cache: Tensor, *, eps: float
) -> None:
    """Plain PyTorch for `context_append`; same arguments, same result up to rounding."""
    layers, _, _, kv_heads, _, dim = cache.shape
    batch, width, _ = keys_values.shape
    split = keys_values.view(batch, width, layers, 2, kv_heads, dim).permute(2, 3, 0, 4, 1, 5)
    keys = plain_norm(split[:, 0], k_weights.view(layers, 1, 1, 1, dim), eps)  # [layers, batch, kv_heads, w, dim]
    positions = start[:, None] + torch.arange(width, device=start.device)  # [batch, w]
    rotary = rope_table.shape[1] // 2
    cos, sin = (t[:, None].to(cache.dtype) for t in rope_table[positions].split(rotary, dim=-1))
    turning, still = keys[..., :rotary], keys[..., rotary:]
    low, high = turning.chunk(2, dim=-1)
    keys = torch.cat((turning * cos + torch.cat((-high, low), dim=-1) * sin, still), dim=-1)
    index = positions[None, :, None, :, None].expand(keys.shape)
    cache[:, 0].scatter_(3, index, keys)
    cache[:, 1].scatter_(3, index, split[:, 1])


# The width is that of a prompt too: code made for each would be compiled at every new length.
@triton.jit(do_not_specialize=["width"])
def _context_append_kernel(  # type: ignore[no-untyped-def]
    source_ptr, weight_ptr, table_ptr, start_ptr, cache_ptr,
    cache_stride_l, cache_stride_kv, cache_stride_b, cache_stride_h, cache_stride_n, eps, width,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    layer = tl.program_id(1)
    values = tl.program_id(2)
    batch = (token // width).to(tl.int64)
    position = tl.load(start_ptr + batch).to(tl.int64) + token % width
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < KV_HEADS) & (dims < DIM)
    dtype = cache_ptr.dtype.element_ty

    source = source_ptr + ((token.to(tl.int64) * LAYERS + layer) * 2 + values) * (KV_HEADS * DIM) + heads * DIM
    target = cache_ptr + layer.to(tl.int64) * cache_stride_l + values * cache_stride_kv + batch * cache_stride_b
    target += heads * cache_stride_h + position * cache_stride_n + dims
    x = tl.load(source + dims, mask=inside, other=0.0)
    if values == 1:
        tl.store(target, x, mask=inside)
    else:
        half: tl.constexpr = ROTARY // 2
        rotates = dims < ROTARY
        # The partner of a rotated dimension lies half the rotary width away.
        partner = tl.where(rotates, tl.where(dims < half, dims + half, dims - half), dims)
        wide = x.to(tl.float32)
        other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        weight = tl.load(weight_ptr + layer * DIM + dims, mask=dims < DIM, other=0.0).to(tl.float32)
        weight_other = tl.load(weight_ptr + layer * DIM + partner, mask=dims < DIM, other=0.0).to(tl.float32)
        # Rounded wherever the draft's own modules round.
        wide = ((wide * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        other = ((other * scale).to(dtype).to(tl.float32) * weight_other).to(dtype).to(tl.float32)
        row = table_ptr + position * (2 * ROTARY) + dims
        cos = tl.load(row, mask=rotates, other=1.0).to(dtype).to(tl.float32)
        sin = tl.load(row + ROTARY, mask=rotates, other=0.0).to(dtype).to(tl.float32)
        sign = tl.where(dims < half, -1.0, 1.0)
        turned = (wide * cos).to(dtype).to(tl.float32) + (sign * other * sin).to(dtype).to(tl.float32)
        tl.store(target, turned.to(dtype), mask=inside)


def context_append(
    keys_values: Tensor, k_weights: Tensor, rope_table: Tensor, start: Tensor, cache: Tensor, *, eps: float
) -> None:
    """Norms and rotates keys, and writes keys and values of w tokens a row to the cache of every layer.

    keys_values [batch, w, layers * 2 * kv_heads * dim] contiguous: the joined projection, layer by layer, keys then
    values; k_weights [layers, dim], the layers' key norms; rope_table [positions, 2 * rotary] fp32, cosines then sines
    of each position, rotary <= dim; start [batch] int64, position of each row's first token, which is also where its
    entries go; cache [layers, 2, batch, kv_heads, length, dim], head dimension contiguous, written in place.
    """
    if not uses_kernels(keys_values):
        context_append_reference(keys_values, k_weights, rope_table, start, cache, eps=eps)
        return
    layers, _, batch, kv_heads, _, dim = cache.shape
    width = keys_values.shape[1]
    if keys_values.shape != (batch, width, layers * 2 * kv_heads * dim) or not keys_values.is_contiguous():
        raise ValueError(f"keys and values {tuple(keys_values.shape)} do not fit a cache {tuple(cache.shape)}")
    if cache.stride(5) != 1 or not rope_table.is_contiguous() or not k_weights.is_contiguous():
        raise ValueError("the head dimension of the cache, the rope table and the norms must be contiguous")
    _context_append_kernel[(batch * width, layers, 2)](
        keys_values, k_weights, rope_table, start, cache, *cache.stride()[:5], eps, width,
        LAYERS=layers, KV_HEADS=kv_heads, DIM=dim, ROTARY=rope_table.shape[1] // 2,
        BLOCK_H=triton.next_power_of_2(kv_heads), BLOCK_D=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
