"""The gate of a gated MLP: act(gate) * up, from one joined projection."""

import torch
from torch import Tensor

from draftsmith.kernels.device import overlapping, uses_kernels
from draftsmith.kernels.triton import tl, triton

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Names, as in a model's configuration, of the activations that `gated_activation` computes."""


def gated_activation_reference(gate_up: Tensor, activation: str, dtype: torch.dtype | None = None) -> Tensor:
    """Plain PyTorch for `gated_activation`."""
    if dtype is not None:
        gate_up = gate_up.sum(0).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "gelu_pytorch_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    raise ValueError(f"activation {activation!r} is not supported; allowed: {', '.join(ACTIVATIONS)}")


@triton.jit
def _gated_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, split_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, GELU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    dtype = out_ptr.dtype.element_ty
    source = x_ptr + row * 2 * WIDTH + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        gate += tl.load(source + split * split_stride, mask=inside, other=0.0)
        up += tl.load(source + split * split_stride + WIDTH, mask=inside, other=0.0)
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate * tl.sigmoid(2.0 * inner)  # 0.5 * (1 + tanh(y)) = sigmoid(2y)
    else:
        activated = gate * tl.sigmoid(gate)
    # Rounded between activation and product, as the model's own code does.
    tl.store(out_ptr + row * WIDTH + columns, (activated.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def gated_activation(gate_up: Tensor, activation: str, dtype: torch.dtype | None = None) -> Tensor:
    """act(gate) * up.

    gate_up [..., 2 I] contiguous, gate first; activation "silu" or "gelu_pytorch_tanh". With a dtype, gate_up is
    [S, ..., 2 I] fp32, S addends of what the model holds in that dtype (`skinny_linear`). Returns [..., I].
    """
    if not uses_kernels(gate_up):
        return gated_activation_reference(gate_up, activation, dtype)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not supported; allowed: {', '.join(ACTIVATIONS)}")
    width = gate_up.shape[-1] // 2
    splits = 1 if dtype is None else gate_up.shape[0]
    shape = gate_up.shape[:-1] if dtype is None else gate_up.shape[1:-1]
    rows = gate_up.numel() // (2 * width * splits)
    out = torch.empty(*shape, width, dtype=dtype or gate_up.dtype, device=gate_up.device)
    # Small pieces of few rows; large ones of many, so that starting programs does not take the time.
    block, warps = (512, 4) if rows * width <= 2**19 else (2048, 8)
    _gated_kernel[(rows, triton.cdiv(width, block))](
        gate_up.contiguous(), out, rows * 2 * width,
        WIDTH=width, BLOCK=block, SPLITS=splits, GELU=activation != "silu", num_warps=warps, **overlapping(out.device),
    )  # fmt: skip
    return out
