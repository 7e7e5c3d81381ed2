"""RMS normalisation, with the residual addition before it folded in."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch for `rms_norm`; same arguments, same results up to rounding."""
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype), total
    return weight * normed.to(x.dtype), total


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, x_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        # The sum is rounded to the model's dtype before it is normed, as the model's own code does.
        x = (
            x.to(tl.float32) + tl.load(residual_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        ).to(dtype)
        tl.store(total_ptr + row * WIDTH + columns, x, mask=inside)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    if UNIT_OFFSET:
        out = normed * (1.0 + weight.to(tl.float32))
    else:
        out = normed.to(dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, out.to(dtype), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Norm of x (+ residual): x, residual [..., H] in bf16, fp16 or fp32, last dimension contiguous; weight [H].

    Returns (normed [..., H], x + residual [..., H]; x itself without a residual). unit_offset: scale by 1 + weight,
    in fp32 (Gemma); otherwise the normed value is rounded to x's dtype before the weight (Llama, Qwen). Statistics in
    fp32.
    """
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows.shape[0],)](
        rows, rows if residual is None else residual.contiguous(), weight, out, total, rows.stride(0), eps,
        WIDTH=width, BLOCK=block, HAS_RESIDUAL=residual is not None, UNIT_OFFSET=unit_offset,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out, total
