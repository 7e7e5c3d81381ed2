"""The product of a few rows on a device: right for every dtype and odd sizes, and a row's bits whatever stands beside
it and whichever tile holds it."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# (outputs, inner): tiles that do not divide evenly, one part, several parts, parts of narrow blocks.
SHAPES = [(130, 200), (3072, 576), (960, 576), (576, 1536), (4096, 4096)]


def _operands(rows, outputs, inner, dtype):
    return (
        torch.randn(rows, inner, device="cuda").to(dtype),
        (torch.randn(outputs, inner, device="cuda") / inner**0.5).to(dtype),
    )


@pytest.mark.parametrize("rows", [1, 16, 17, 31, 32])
@pytest.mark.parametrize(
    ("dtype", "outputs", "inner"),
    [(torch.float32, *SHAPES[0]), (torch.float16, *SHAPES[0]), *((torch.bfloat16, *shape) for shape in SHAPES[:4])],
)
def test_a_few_rows_times_a_matrix(rows, dtype, outputs, inner):
    from draftsmith.kernels.layers.skinny_linear import skinny_linear

    x, weight = _operands(rows, outputs, inner, dtype)
    found = skinny_linear(x, weight).sum(0)
    expected = x.double() @ weight.double().T
    assert (found - expected).norm() <= 5e-5 * expected.norm()
    weight[outputs // 2, inner // 2] += 1
    assert (skinny_linear(x, weight).sum(0) != found).any(0).nonzero().tolist() == [[outputs // 2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inner"), SHAPES)
def test_a_rows_bits_are_the_same_in_either_tile_and_beside_any_rows(dtype, outputs, inner):
    from draftsmith.kernels.layers.skinny_linear import skinny_linear, skinny_tiling

    x, weight = _operands(32, outputs, inner, dtype)
    whole = skinny_linear(x, weight)
    for rows in (1, 7, 16, 17, 31):
        assert torch.equal(skinny_linear(x[:rows].contiguous(), weight), whole[:, :rows])
    few = x[:5].contiguous()
    wide = skinny_tiling(few, weight)._replace(rows=32)
    assert torch.equal(skinny_linear(few, weight), skinny_linear(few, weight, tiling=wide))
