"""Products of a few rows with large matrices: the skinny product and the argmax over the vocabulary."""

import pytest
import torch

pytest.importorskip("triton")

from draftsmith.kernels.skinny_linear import skinny_linear, skinny_linear_reference
from draftsmith.kernels.vocabulary_argmax import vocabulary_argmax, vocabulary_argmax_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "outputs", "inner", "splits"), [(1, 130, 200, 2), (5, 64, 256, None), (16, 96, 64, 1)]
)
def test_skinny_linear(dtype, rows, outputs, inner, splits):
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outputs, inner).to(dtype)
    expected = skinny_linear_reference(x, weight).sum(0)
    actual = skinny_linear(x, weight, splits=splits, block_k=64)
    assert actual.shape[1:] == (rows, outputs)
    torch.testing.assert_close(actual.sum(0), expected, atol=2e-4, rtol=1e-4)
    weight[-1, -1] += 1.0
    changed = skinny_linear(x, weight, splits=splits, block_k=64).sum(0)
    assert torch.equal(changed[:, :-1], actual.sum(0)[:, :-1])
    assert not torch.equal(changed[:, -1], actual.sum(0)[:, -1])


def test_skinny_linear_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at most 16 rows, got 17"):
        skinny_linear(torch.randn(17, 8), torch.randn(4, 8))
    with pytest.raises(ValueError, match="does not fit"):
        skinny_linear(torch.randn(2, 9), torch.randn(4, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "vocabulary", "inner"), [(1, 301, 64), (19, 130, 72)])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_vocabulary_argmax(dtype, rows, vocabulary, inner, softcap):
    hidden = torch.randn(rows, inner).to(dtype)
    weight = (2 * inner**-0.5 * torch.randn(vocabulary, inner)).to(dtype)
    ids, finite = vocabulary_argmax(hidden, weight, softcap, block_k=64)
    assert torch.equal(ids, vocabulary_argmax_reference(hidden, weight, softcap)[0])
    assert finite.all()
    weight[7] = 3 * hidden[-1]
    assert vocabulary_argmax(hidden, weight, softcap, block_k=64)[0][-1] == 7


def test_ties_go_to_the_lowest_id():
    hidden, weight = torch.ones(1, 16), torch.randn(200, 16)
    weight[[70, 140, 190]] = 5.0  # across tiles
    for function in (vocabulary_argmax, vocabulary_argmax_reference):
        assert function(hidden, weight)[0].tolist() == [70]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_reported(value):
    hidden, weight = torch.ones(2, 16), torch.randn(200, 16)
    hidden[0] = 0.5
    weight[150, 3] = value
    for function in (vocabulary_argmax, vocabulary_argmax_reference):
        # One logit at minus infinity is an id that is never chosen; all of them leave nothing to choose.
        assert function(hidden, weight)[1].tolist() == [value == float("-inf")] * 2
        assert function(hidden, torch.full((50, 16), value))[1].tolist() == [False, False]
