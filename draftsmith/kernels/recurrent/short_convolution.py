"""Causal depthwise convolution over a few tokens, with its last inputs kept between passes (`kernels.recurrent.kept`).

It runs before the recurrences of Gated DeltaNet, Kimi Delta Attention and Mamba 2, and is a layer of its own in LFM2.
"""

import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.recurrent.kept import Pass, Standing
from draftsmith.kernels.triton import tl, triton

CHANNELS = 256
TOKENS = 16


def short_convolution(
    x: Tensor,
    window: Tensor,
    kept: Tensor,
    standing: Standing,
    run: Pass,
    weight: Tensor,
    bias: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """out[t] = act(bias + sum_j weight[:, j] * input[t - (K - 1) + j]) -> [slots, w, C] in x's dtype, summed in fp32.

    x [slots, w, C]; window [slots, 2, K - 1, C], the inputs before the kept ones, oldest first; kept [slots, 2, width,
    C], inputs of tentative tokens; weight [C, K]; bias [C] or None. Inputs before a text's first are zero. The pass
    writes the other half of window, and of kept if it is tentative; call `Standing.passed` after the last layer.
    Raises `ValueError` for shapes that do not fit.
    """
    _check(x, window, kept, weight, run)
    if uses_kernels(x):
        return _launch(x, window, kept, standing, run, weight, bias, silu)
    return short_convolution_reference(x, window, kept, standing, run, weight, bias, silu=silu)


def short_convolution_reference(
    x: Tensor,
    window: Tensor,
    kept: Tensor,
    standing: Standing,
    run: Pass,
    weight: Tensor,
    bias: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """`short_convolution` as plain PyTorch."""
    slots, width, channels = x.shape
    taps = weight.shape[1]
    index = torch.arange(slots, device=x.device)
    count = standing.count.where(~run.begins, 0)
    before = torch.cat((window[index, standing.half], kept[index, standing.half]), dim=1)
    before = before.where(~run.begins[:, None, None], 0)
    ages = torch.arange(taps - 1, device=x.device)
    recent = before.gather(1, (count[:, None] + ages)[:, :, None].expand(-1, -1, channels))  # [slots, K - 1, C]
    inputs = torch.cat((recent, x), dim=1)
    out = functional.conv1d(
        inputs.float().transpose(1, 2),
        weight.float()[:, None],
        None if bias is None else bias.float(),
        groups=channels,
    )
    other = 1 - standing.half
    if run.tentative:
        window[index, other] = recent
        kept[index, other, :width] = x
    else:
        own = run.valid if run.valid is not None else torch.full_like(count, width)
        window[index, other] = inputs.gather(1, (own[:, None] + ages)[:, :, None].expand(-1, -1, channels))
    return (functional.silu(out) if silu else out).transpose(1, 2).to(x.dtype).contiguous()


@triton.jit
def _input(  # type: ignore[no-untyped-def]
    at, x_at, x_token, window_at, kept_at, count, former, channel, channels, BEFORE: tl.constexpr,
):  # fmt: skip
    """Input number `at` of the pass; negative: of those before it, which lie in the window and behind it in kept."""
    past = at + BEFORE + count
    x = tl.load(x_at + at * x_token, mask=channel < tl.where(at >= 0, channels, 0), other=0.0)
    in_window = tl.where((at < 0) & (past < BEFORE), former, 0)
    seen = tl.load(window_at + past * channels, mask=channel < in_window, other=0.0)
    in_kept = tl.where((at < 0) & (past >= BEFORE), former, 0)
    given = tl.load(kept_at + (past - BEFORE) * channels, mask=channel < in_kept, other=0.0)
    return x + seen + given  # two of them are 0


@triton.jit
def _convolution_kernel(  # type: ignore[no-untyped-def]
    x_ptr, window_ptr, kept_ptr, count_ptr, half_ptr, begins_ptr, valid_ptr, weight_ptr, bias_ptr, out_ptr,
    width, capacity, channels, x_slot, x_token,
    TAPS: tl.constexpr, TENTATIVE: tl.constexpr, VALID: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(2) * TOKENS
    inside = channel < channels
    BEFORE: tl.constexpr = TAPS - 1
    half = tl.load(half_ptr + slot)
    begins = tl.load(begins_ptr + slot) != 0
    former = tl.where(begins, 0, channels)
    count = tl.where(begins, 0, tl.load(count_ptr + slot)).to(tl.int32)
    x_at = x_ptr + slot * x_slot + channel
    window_at = window_ptr + (slot * 2 + half) * BEFORE * channels + channel
    kept_at = kept_ptr + (slot * 2 + half) * capacity * channels + channel
    new_window_at = window_ptr + (slot * 2 + 1 - half) * BEFORE * channels + channel
    new_kept_at = kept_ptr + (slot * 2 + 1 - half) * capacity * channels + channel
    bias = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for token in range(first, tl.minimum(first + TOKENS, width)):
        total = bias
        for tap in tl.static_range(TAPS):
            x = _input(
                token - BEFORE + tap, x_at, x_token, window_at, kept_at, count, former, channel, channels, BEFORE
            )
            weight = tl.load(weight_ptr + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            total += weight * x.to(tl.float32)
        if SILU:
            total = total * tl.sigmoid(total)
        tl.store(out_ptr + (slot * width + token) * channels + channel, total.to(out_ptr.dtype.element_ty), mask=inside)
        if TENTATIVE:
            tl.store(new_kept_at + token * channels, tl.load(x_at + token * x_token, mask=inside), mask=inside)
    if first == 0:
        stands = width
        if VALID:
            stands = tl.load(valid_ptr + slot).to(tl.int32)
        if TENTATIVE:
            stands = stands * 0
        for age in tl.static_range(BEFORE):
            x = _input(
                stands + age - BEFORE, x_at, x_token, window_at, kept_at, count, former, channel, channels, BEFORE
            )
            tl.store(new_window_at + age * channels, x, mask=inside)


def _launch(
    x: Tensor,
    window: Tensor,
    kept: Tensor,
    standing: Standing,
    run: Pass,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
) -> Tensor:
    slots, width, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(CHANNELS, triton.next_power_of_2(channels))
    _convolution_kernel[(slots, triton.cdiv(channels, block), triton.cdiv(width, TOKENS))](
        x, window, kept, standing.count, standing.half, run.begins, run.valid, weight, bias, out,
        width, kept.shape[2], channels, x.stride(0), x.stride(1),
        TAPS=weight.shape[1], TENTATIVE=run.tentative, VALID=run.valid is not None, BIAS=bias is not None, SILU=silu,
        BLOCK=block, TOKENS=TOKENS, num_warps=max(1, block // 64),
    )  # fmt: skip
    return out


def _check(x: Tensor, window: Tensor, kept: Tensor, weight: Tensor, run: Pass) -> None:
    slots, width, channels = x.shape
    taps = weight.shape[1]
    fits = window.shape == (slots, 2, taps - 1, channels) and kept.shape[:2] == (slots, 2)
    if not fits or kept.shape[3] != channels or len(weight) != channels or x.stride(2) != 1:
        raise ValueError(
            f"inputs {tuple(x.shape)}, window {tuple(window.shape)}, kept {tuple(kept.shape)}, weight "
            f"{tuple(weight.shape)}; the inputs' channels must be contiguous"
        )
    if run.tentative and width > kept.shape[2]:
        raise ValueError(f"a tentative pass of {width} tokens, and room is kept for {kept.shape[2]}")
