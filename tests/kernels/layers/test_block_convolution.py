"""The convolution inside a block in one launch, against `drafts.convolution`."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftsmith.drafts.convolution import convolve
from draftsmith.kernels.layers.block_convolution import block_convolution


def plain(hidden: Tensor, base: Tensor, deltas: Tensor, which: int) -> Tensor:
    taps = base.shape[1]
    return convolve(hidden, base[which], deltas.unflatten(-1, (2, taps, -1))[..., which, :, :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("taps", "groups", "width", "slots"), [(2, 3, 4, 7), (4, 5, 70, 3), (1, 1, 5, 2), (3, 36, 16, 1)]
)
def test_it_equals_the_modules_arithmetic(
    taps: int, groups: int, width: int, slots: int, which: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(taps + groups)
    hidden, base = torch.randn(3, slots, groups * width).to(dtype), torch.randn(2, taps, groups * width).to(dtype)
    deltas = torch.randn(3, slots, 2 * taps * groups).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    found = block_convolution(hidden, base, deltas, which=which)
    torch.testing.assert_close(found, plain(hidden, base, deltas, which), atol=tolerance, rtol=tolerance)
    addends, of_deltas = torch.randn(3, *hidden.shape), torch.randn(2, *deltas.shape)
    torch.testing.assert_close(
        block_convolution(addends, base, of_deltas, which=which, partial=True, partial_deltas=True),
        plain(addends.sum(0).to(dtype), base, of_deltas.sum(0).to(dtype), which),
        atol=2 * tolerance,
        rtol=tolerance,
    )


def test_nothing_crosses_the_edge_of_a_block_nor_comes_from_later_slots() -> None:
    torch.manual_seed(3)
    hidden, base, deltas = torch.randn(2, 5, 12), torch.randn(2, 3, 12), torch.randn(2, 5, 18)
    before = block_convolution(hidden, base, deltas, which=0)
    hidden[0, 3] += 1.0
    changed = (block_convolution(hidden, base, deltas, which=0) != before).any(-1)
    assert changed.tolist() == [[False, False, False, True, True], [False] * 5]


def test_operands_that_do_not_fit_are_refused() -> None:
    hidden, base, deltas = torch.randn(2, 5, 12), torch.randn(2, 3, 12), torch.randn(2, 5, 18)
    with pytest.raises(ValueError, match="which 2"):
        block_convolution(hidden, base, deltas, which=2)
    for wrong in (torch.randn(2, 5, 17), torch.randn(2, 4, 18), torch.randn(2, 5, 30)):
        with pytest.raises(ValueError, match="deltas"):
            block_convolution(hidden, base, wrong, which=0)
    with pytest.raises(ValueError, match="contiguous"):
        block_convolution(hidden.transpose(0, 1), base, deltas.transpose(0, 1), which=0)
