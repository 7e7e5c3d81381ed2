"""RMS normalisation, with what stands before it folded in: a sum of partial products, a norm, a residual addition."""

import torch
from torch import Tensor

from draftsmith.kernels.device import overlapping, uses_kernels
from draftsmith.kernels.triton import tl, triton


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    unit_offset: bool = False,
    post_weight: Tensor | None = None,
    partial: bool = False,
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch for `rms_norm`; same arguments, same results up to rounding."""
    total = x.sum(0).to(weight.dtype) if partial else x
    if post_weight is not None:
        total = plain_norm(total, post_weight, eps, unit_offset)
    if residual is not None:
        total = residual + total
    return plain_norm(total, weight, eps, unit_offset), total


def plain_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """RMS norm of x [..., H] with a weight [H], or one for each of some leading indices, as Llama's (or with
    `unit_offset` Gemma's) code computes it.

    What the kernels are held to, targets' and drafts' alike, so it knows neither's modules. A draft's own `RMSNorm`
    also runs in fp64 and under autocast; that the two agree is tested where a draft's fused pass is.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


@triton.jit
def _scaled(  # type: ignore[no-untyped-def]
    wide, weight_ptr, columns, inside, eps, WIDTH: tl.constexpr, UNIT_OFFSET: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        out = normed * (1.0 + weight)
    else:
        out = normed.to(dtype).to(tl.float32) * weight
    return out.to(dtype)


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, post_ptr, out_ptr, total_ptr, x_stride, split_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr, KEEP_TOTAL: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wide = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        wide += tl.load(x_ptr + split * split_stride + row * x_stride + columns, mask=inside, other=0.0)
    # Every value is rounded to the model's dtype where the model's own code rounds it.
    wide = wide.to(dtype).to(tl.float32)
    if HAS_POST:
        wide = _scaled(wide, post_ptr, columns, inside, eps, WIDTH, UNIT_OFFSET, dtype).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(dtype).to(tl.float32)
    if KEEP_TOTAL:
        tl.store(total_ptr + row * WIDTH + columns, wide.to(dtype), mask=inside)
    out = _scaled(wide, weight_ptr, columns, inside, eps, WIDTH, UNIT_OFFSET, dtype)
    tl.store(out_ptr + row * WIDTH + columns, out, mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    unit_offset: bool = False,
    post_weight: Tensor | None = None,
    partial: bool = False,
) -> tuple[Tensor, Tensor]:
    """Norm of (x + residual): returns (normed [..., H], the sum [..., H]; x itself where nothing was done to it).

    x, residual [..., H] in bf16, fp16 or fp32, last dimension contiguous; weight [H]. partial: x is [S, ..., H] fp32,
    S addends of what the model holds in the weight's dtype (`skinny_linear`). post_weight [H]: x is normed with it
    before the residual is added (Gemma's norm after a sublayer). unit_offset: norms scale by 1 + weight, in fp32
    (Gemma); otherwise the normed value is rounded to the dtype before the weight (Llama, Qwen). Statistics in fp32.
    """
    if not uses_kernels(x):
        return rms_norm_reference(
            x, weight, eps, residual, unit_offset=unit_offset, post_weight=post_weight, partial=partial
        )
    width = x.shape[-1]
    splits = x.shape[0] if partial else 1
    shape = x.shape[1:] if partial else x.shape
    rows = x.reshape(-1, width)
    out = torch.empty(shape, dtype=weight.dtype, device=x.device)
    changed = partial or residual is not None or post_weight is not None
    total = torch.empty_like(out) if changed else x
    block = triton.next_power_of_2(width)
    num_rows = rows.shape[0] // splits
    _rms_norm_kernel[(num_rows,)](
        rows, rows if residual is None else residual.contiguous(), weight,
        weight if post_weight is None else post_weight, out, total, rows.stride(0), num_rows * rows.stride(0), eps,
        WIDTH=width, BLOCK=block, SPLITS=splits, HAS_RESIDUAL=residual is not None,
        HAS_POST=post_weight is not None, KEEP_TOTAL=changed, UNIT_OFFSET=unit_offset,
        num_warps=min(16, max(1, block // 512)), **overlapping(x.device),
    )  # fmt: skip
    return out, total
