"""The short convolution over a few tokens, with inputs kept between passes."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.kernels.recurrent import short_convolution as module
from draftsmith.kernels.recurrent.kept import Pass, Standing
from draftsmith.kernels.recurrent.short_convolution import short_convolution, short_convolution_reference

WIDTH = 5


def storage(slots: int, taps: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Standing]:
    window = torch.randn(slots, 2, taps - 1, channels).to(dtype)
    kept = torch.randn(slots, 2, WIDTH, channels).to(dtype)
    return window, kept, Standing(torch.randint(0, WIDTH + 1, (slots,)), torch.randint(0, 2, (slots,)))


@pytest.mark.parametrize(("taps", "channels"), [(4, 10), (2, 300), (3, 1)])
def test_passes_of_which_some_tokens_stand_give_the_text_that_stands(taps: int, channels: int) -> None:
    slots = 3
    text, weight, bias = torch.randn(slots, 40, channels), torch.randn(channels, taps), torch.randn(channels)
    padded = functional.pad(text, (0, 0, taps - 1, 0))
    expected = functional.silu(
        functional.conv1d(padded.transpose(1, 2), weight[:, None], bias, groups=channels)
    ).transpose(1, 2)
    window, kept, standing = storage(slots, taps, channels, torch.float32)
    at = torch.randint(1, 8, (slots,))
    run = Pass(torch.ones(slots, dtype=torch.bool), at.clone(), False)
    out = short_convolution(text[:, :8], window, kept, standing, run, weight, bias, silu=True)
    standing.passed(0)
    for b in range(slots):
        torch.testing.assert_close(out[b, : at[b]], expected[b, : at[b]], atol=1e-5, rtol=1e-5)
    for _ in range(5):
        stands = torch.randint(0, WIDTH + 1, (slots,))
        x = torch.randn(slots, WIDTH, channels)
        for b in range(slots):
            x[b, : stands[b]] = text[b, at[b] : at[b] + stands[b]]
        run = Pass(torch.zeros(slots, dtype=torch.bool), None, True)
        out = short_convolution(x, window, kept, standing, run, weight, bias, silu=True)
        standing.passed(stands)
        for b in range(slots):
            n = int(stands[b])
            torch.testing.assert_close(out[b, :n], expected[b, at[b] : at[b] + n], atol=1e-5, rtol=1e-5)
        at += stands


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tentative", "width"), [(True, 5), (True, 2), (False, 5), (False, 2), (False, 37)])
@pytest.mark.parametrize(("taps", "channels", "silu"), [(4, 10, True), (2, 300, False), (3, 1, True)])
def test_the_kernel_is_the_reference(
    taps: int, channels: int, silu: bool, tentative: bool, width: int, dtype: torch.dtype
) -> None:
    slots = 4
    window, kept, standing = storage(slots, taps, channels, dtype)
    x = torch.randn(slots, width, channels + 3).to(dtype)[..., :channels]
    weight, bias = torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype) if silu else None
    begins = torch.arange(slots) % 3 == 1
    run = Pass(begins, None if tentative else torch.randint(0, width + 1, (slots,)), tentative)
    twin_window, twin_kept = window.clone(), kept.clone()
    out = module._launch(x, window, kept, standing, run, weight, bias, silu)
    expected = short_convolution_reference(x, twin_window, twin_kept, standing, run, weight, bias, silu=silu)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(window, twin_window)
    assert torch.equal(kept, twin_kept)
    assert not torch.allclose(module._launch(x + 1, window, kept, standing, run, weight, bias, silu), expected)


def test_operands_that_do_not_fit_are_refused() -> None:
    window, kept, standing = storage(2, 4, 6, torch.float32)
    tentative, weight = Pass(torch.zeros(2, dtype=torch.bool), None, True), torch.randn(6, 4)
    with pytest.raises(ValueError, match="room is kept for 5"):
        short_convolution(torch.randn(2, 6, 6), window, kept, standing, tentative, weight, None, silu=True)
    with pytest.raises(ValueError, match="window"):
        short_convolution(torch.randn(2, 5, 6), window[:, :, 1:], kept, standing, tentative, weight, None, silu=True)
