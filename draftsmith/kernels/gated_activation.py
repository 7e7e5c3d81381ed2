"""The gate of a gated MLP: act(gate) * up, from one joined projection."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def gated_activation_reference(gate_up: Tensor, activation: str) -> Tensor:
    """Plain PyTorch for `gated_activation`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "gelu_pytorch_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    raise ValueError(f"activation {activation!r} is not supported; allowed: silu, gelu_pytorch_tanh")


@triton.jit
def _gated_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate * tl.sigmoid(2.0 * inner)  # 0.5 * (1 + tanh(y)) = sigmoid(2y)
    else:
        activated = gate * tl.sigmoid(gate)
    # Rounded between activation and product, as the model's own code does.
    tl.store(out_ptr + row * WIDTH + columns, (activated.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up.

    gate_up [..., 2 I] contiguous, gate first; activation "silu" or "gelu_pytorch_tanh". Returns [..., I].
    """
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise ValueError(f"activation {activation!r} is not supported; allowed: silu, gelu_pytorch_tanh")
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    _gated_kernel[(rows.shape[0], triton.cdiv(width, 1024))](
        rows, out, WIDTH=width, BLOCK=1024, GELU=activation != "silu", num_warps=4
    )
    return out
