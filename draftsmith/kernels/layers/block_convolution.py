"""DFlash 2's grouped dynamic convolution inside a block, in one launch; `drafts.convolution` has the formula."""

import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.kernels.device import overlapping, uses_kernels
from draftsmith.kernels.triton import tl, triton

CHANNELS = 256
"""Of one slot, in one program: a decode step has few slots, and its launch is over when the last channel is."""


def convolve(hidden: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """hidden [..., B, H], base [K, H], delta [..., B, K, groups] -> [..., B, H] in hidden's dtype.

    The two products are added one after the other: base + delta in bf16 would round a small delta away.
    """
    taps, groups = delta.shape[-2:]
    width = hidden.shape[-1] // groups
    slots = hidden.unflatten(-1, (groups, width))  # [..., B, groups, width]
    weights = base.to(hidden.dtype).unflatten(-1, (groups, width))  # [K, groups, width]
    delta = delta.to(hidden.dtype).unsqueeze(-1)  # [..., B, K, groups, 1]
    mixed = torch.zeros_like(slots)
    for tap in range(taps):
        earlier = _delayed(slots, tap)
        mixed = mixed + weights[tap] * earlier + delta[..., tap, :, :] * earlier
    return mixed.flatten(-2)


def _delayed(slots: Tensor, steps: int) -> Tensor:
    """Slot t holds what slot t - steps held, zeros before the first: [..., B, groups, width]."""
    if steps == 0:
        return slots
    kept = slots[..., : max(slots.shape[-3] - steps, 0), :, :]
    return functional.pad(kept, (0, 0, 0, 0, slots.shape[-3] - kept.shape[-3], 0))


def block_convolution_reference(
    hidden: Tensor, base: Tensor, deltas: Tensor, *, which: int, partial: bool = False, partial_deltas: bool = False
) -> Tensor:
    """Plain PyTorch for `block_convolution`."""
    hidden = hidden.sum(0).to(base.dtype) if partial else hidden
    deltas = deltas.sum(0).to(base.dtype) if partial_deltas else deltas
    return convolve(hidden, base[which], deltas.unflatten(-1, (2, base.shape[1], -1))[..., which, :, :])


@triton.jit
def _convolution_kernel(  # type: ignore[no-untyped-def]
    x_ptr, base_ptr, deltas_ptr, out_ptr, slots, x_split, deltas_split,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, TAPS: tl.constexpr, WHICH: tl.constexpr,
    X_SPLITS: tl.constexpr, DELTA_SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < WIDTH
    groups = channels // (WIDTH // GROUPS)
    slot = (row % slots).to(tl.int32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        # Slots before the block's first count as zero.
        there = channels < WIDTH * tl.minimum(tl.maximum(slot - tap + 1, 0), 1)
        x_at = x_ptr + (row - tap) * WIDTH + channels
        x = tl.load(x_at, mask=there, other=0.0).to(tl.float32)
        for split in tl.static_range(1, X_SPLITS):
            x += tl.load(x_at + split * x_split, mask=there, other=0.0)
        delta_at = deltas_ptr + (row * 2 * TAPS + WHICH * TAPS + tap) * GROUPS + groups
        delta = tl.load(delta_at, mask=there, other=0.0).to(tl.float32)
        for split in tl.static_range(1, DELTA_SPLITS):
            delta += tl.load(delta_at + split * deltas_split, mask=there, other=0.0)
        base = tl.load(base_ptr + (WHICH * TAPS + tap) * WIDTH + channels, mask=inside, other=0.0).to(tl.float32)
        # Sums of addends are rounded to the model's dtype, as the products that they stand for would be.
        total += (base + delta.to(dtype).to(tl.float32)) * x.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + channels, total.to(dtype), mask=inside)


def block_convolution(
    hidden: Tensor, base: Tensor, deltas: Tensor, *, which: int, partial: bool = False, partial_deltas: bool = False
) -> Tensor:
    """One of the two convolutions around a sublayer: -> [..., B, H] in base's dtype, summed in fp32.

    hidden [..., B, H]; base [2, K, H], `BlockConvolution.base_kernel`; deltas [..., B, 2*K*groups], what its projection
    gives; all contiguous, in bf16, fp16 or fp32. which: 0 for the sublayer's input, 1 for its output. partial,
    partial_deltas: hidden or deltas are S addends in fp32, [S, ...], of such a tensor (`skinny_linear`). Raises
    `ValueError` for shapes or strides that do not fit.
    """
    if not uses_kernels(hidden):
        return block_convolution_reference(
            hidden, base, deltas, which=which, partial=partial, partial_deltas=partial_deltas
        )
    shape = hidden.shape[1:] if partial else hidden.shape
    deltas_shape = deltas.shape[1:] if partial_deltas else deltas.shape
    taps, width = base.shape[1:]
    groups = deltas_shape[-1] // (2 * taps)
    fits = shape[-1] == width and deltas_shape[:-1] == shape[:-1] and groups * 2 * taps == deltas_shape[-1]
    if not fits or width % groups or which not in (0, 1):
        raise ValueError(
            f"states {tuple(shape)}, kernels {tuple(base.shape)}, deltas {tuple(deltas_shape)}, which {which!r}"
        )
    if not (hidden.is_contiguous() and base.is_contiguous() and deltas.is_contiguous()):
        raise ValueError("states, kernels and deltas must be contiguous")
    out = torch.empty(shape, dtype=base.dtype, device=hidden.device)
    rows = out.numel() // width
    block = min(CHANNELS, triton.next_power_of_2(width))
    _convolution_kernel[(rows, triton.cdiv(width, block))](
        hidden, base, deltas, out, shape[-2], rows * width, rows * deltas_shape[-1],
        WIDTH=width, GROUPS=groups, TAPS=taps, WHICH=which,
        X_SPLITS=hidden.shape[0] if partial else 1, DELTA_SPLITS=deltas.shape[0] if partial_deltas else 1,
        BLOCK=block, num_warps=max(1, block // 64), **overlapping(hidden.device),
    )  # fmt: skip
    return out
