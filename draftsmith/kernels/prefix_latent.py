"""Domino's latent: SiLU(W1 [h; s]), of which the part W1 h is known for all slots before the first step."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def prefix_latent_reference(from_hidden: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Plain PyTorch for `prefix_latent`, in fp32 from the inputs as they are."""
    return torch.nn.functional.silu(from_hidden.float() + state.float() @ weight.float().T).to(state.dtype)


@triton.jit
def _latent_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr, weight_ptr, state_ptr, out_ptr, hidden_stride, weight_stride, width, rank, batch,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    dims = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    dim_ok = dims < rank
    rows = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    row_ok = rows < batch
    total = tl.zeros([BLOCK_E, BLOCK_B], tl.float32)
    for first in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        inner = first + tl.arange(0, BLOCK_K)
        inner_ok = inner < width
        weight_offset = dims.to(tl.int64)[:, None] * weight_stride + inner[None, :]
        weight = tl.load(weight_ptr + weight_offset, mask=dim_ok[:, None] & inner_ok[None, :], other=0.0)
        state_offset = rows[None, :] * width + inner[:, None]
        state = tl.load(state_ptr + state_offset, mask=inner_ok[:, None] & row_ok[None, :], other=0.0)
        total = tl.dot(weight, state, total, input_precision="ieee")
    ok = dim_ok[:, None] & row_ok[None, :]
    hidden_offset = rows[None, :] * hidden_stride + dims[:, None]
    total += tl.load(hidden_ptr + hidden_offset, mask=ok, other=0.0).to(tl.float32)
    out = (total * tl.sigmoid(total)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[None, :] * rank + dims[:, None], out, mask=ok)


def prefix_latent(
    from_hidden: Tensor,
    weight: Tensor,
    state: Tensor,
    out: Tensor,
    *,
    dims: int = 16,
    depth: int = 256,
    warps: int = 2,
    stages: int = 4,
) -> None:
    """`out` = SiLU(from_hidden + W s).

    from_hidden [batch, E], rows contiguous, any float dtype; weight W [E, G], rows contiguous (the columns of W1 that
    meet the state); state [batch, G] and out [batch, E] contiguous; weight, state and out of one dtype. fp32
    accumulation.
    """
    batch, width = state.shape
    rank = weight.shape[0]
    if weight.shape != (rank, width) or from_hidden.shape != (batch, rank) or out.shape != (batch, rank):
        shapes = [tuple(tensor.shape) for tensor in (from_hidden, weight, state, out)]
        raise ValueError(f"shapes {shapes} are not [batch, E], [E, G], [batch, G], [batch, E]")
    if weight.dtype != state.dtype or out.dtype != state.dtype:
        raise ValueError(f"dtypes {weight.dtype}, {state.dtype}, {out.dtype}: weight, state and out must be of one")
    if weight.stride(1) != 1 or from_hidden.stride(1) != 1 or not (state.is_contiguous() and out.is_contiguous()):
        raise ValueError("rows of from_hidden and weight, and all of state and out, must be contiguous")
    block_b = min(32, max(16, triton.next_power_of_2(batch)))
    depth = max(16, min(depth, triton.next_power_of_2(width)))
    if weight.element_size() == 4:
        depth = min(depth, 128)
    _latent_kernel[(triton.cdiv(rank, dims), triton.cdiv(batch, block_b))](
        from_hidden, weight, state, out, from_hidden.stride(0), weight.stride(0), width, rank, batch,
        BLOCK_E=dims, BLOCK_K=depth, BLOCK_B=block_b, STAGES=stages, num_warps=warps,
    )  # fmt: skip
