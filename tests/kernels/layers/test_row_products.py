"""Products of a few rows with large matrices: the skinny product and the argmax over the vocabulary."""

import pytest
import torch

pytest.importorskip("triton")

from draftsmith.kernels.layers.joined import join_rows
from draftsmith.kernels.layers.skinny_linear import (
    linear_or_addends,
    skinny_linear,
    skinny_linear_reference,
    skinny_tiling,
)
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.vocabulary.vocabulary_argmax import (
    argmax_tiling,
    vocabulary_argmax,
    vocabulary_argmax_reference,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "outputs", "inner", "splits"),
    [(1, 130, 200, 2), (5, 64, 256, None), (16, 96, 64, 1), (17, 130, 200, 2), (31, 64, 192, None), (32, 97, 64, 1)],
)
def test_skinny_linear(dtype, rows, outputs, inner, splits):
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outputs, inner).to(dtype)
    expected = skinny_linear_reference(x, weight).sum(0)
    tiling = skinny_tiling(x, weight)._replace(depth=64)
    tiling = tiling if splits is None else tiling._replace(splits=splits)
    actual = skinny_linear(x, weight, tiling=tiling)
    assert actual.shape[1:] == (rows, outputs)
    torch.testing.assert_close(actual.sum(0), expected, atol=2e-4, rtol=1e-4)
    weight[-1, -1] += 1.0
    changed = skinny_linear(x, weight, tiling=tiling).sum(0)
    assert torch.equal(changed[:, :-1], actual.sum(0)[:, :-1])
    assert not torch.equal(changed[:, -1], actual.sum(0)[:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_does_not_depend_on_the_other_rows(dtype):
    x, weight = torch.randn(32, 200).to(dtype), torch.randn(70, 200).to(dtype)
    tiling = Tiling(rows=32, columns=64, depth=64, splits=2)
    whole = skinny_linear(x, weight, tiling=tiling)
    others = torch.randn(32, 200).to(dtype)
    others[13] = x[13]
    for rows in (32, 17, 14):
        beside = skinny_linear(others[:rows], weight, tiling=tiling)
        assert torch.equal(beside[:, 13], whole[:, 13])
        assert not torch.equal(beside[:, 12], whole[:, 12])


@pytest.mark.parametrize("held", [2, 3, 9])
def test_weights_may_be_fetched_early(held):
    x, weight = torch.randn(20, 400), torch.randn(70, 400)  # parts of 4 blocks, the last one of 3 with a tail
    tiling = Tiling(rows=32, columns=64, depth=64, splits=2)
    found = skinny_linear(x, weight, tiling=tiling._replace(held=held))
    torch.testing.assert_close(found, skinny_linear(x, weight, tiling=tiling), atol=1e-4, rtol=1e-4)


def test_skinny_linear_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at most 32 rows, got 33"):
        skinny_linear(torch.randn(33, 8), torch.randn(4, 8))
    with pytest.raises(ValueError, match="tile of 16 rows does not hold 17"):
        skinny_linear(torch.randn(17, 8), torch.randn(4, 8), tiling=Tiling(rows=16, columns=64, depth=64))
    with pytest.raises(ValueError, match="does not fit"):
        skinny_linear(torch.randn(2, 9), torch.randn(4, 8))


def test_addends_come_of_few_rows_that_may_come_so():
    # 9 blocks of 64: parts of three whole blocks.
    x, weight, bias = torch.randn(2, 3, 576).half(), torch.randn(70, 576).half(), torch.randn(70).half()
    expected = torch.nn.functional.linear(x, weight)
    addends, partial = linear_or_addends(x, weight)
    assert partial
    assert addends.shape == (3, 2, 3, 70)
    torch.testing.assert_close(addends.sum(0).half(), expected, atol=0.05, rtol=2e-3)
    for arguments, options in (
        ((x, weight, bias), {}),
        ((x.float(), weight.float()), {}),
        ((x.repeat(6, 1, 1), weight), {}),
    ):
        whole, partial = linear_or_addends(*arguments, **options)
        assert not partial
        assert torch.equal(whole, torch.nn.functional.linear(*arguments))


def test_joined_parameters_are_views_of_one_storage():
    parameters = [torch.nn.Parameter(torch.randn(rows, 5)) for rows in (3, 1, 4)]
    expected = torch.cat([parameter.detach().clone() for parameter in parameters])
    whole = join_rows(parameters)
    assert torch.equal(whole, expected)
    assert join_rows(parameters).data_ptr() == whole.data_ptr(), "joined before: nothing moves"
    assert join_rows(parameters[:2]).data_ptr() == whole.data_ptr()
    assert join_rows([parameters[0], parameters[2]]).data_ptr() != whole.data_ptr()
    whole[3] = 7.0
    assert torch.equal(parameters[1], torch.full((1, 5), 7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "vocabulary", "inner"), [(1, 301, 64), (19, 130, 72), (100, 300, 64), (270, 70, 64)])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_vocabulary_argmax(dtype, rows, vocabulary, inner, softcap):
    hidden = torch.randn(rows, inner).to(dtype)
    weight = (2 * inner**-0.5 * torch.randn(vocabulary, inner)).to(dtype)
    tiling = argmax_tiling(hidden)._replace(depth=64)
    ids, finite = vocabulary_argmax(hidden, weight, softcap, tiling=tiling)
    assert torch.equal(ids, vocabulary_argmax_reference(hidden, weight, softcap)[0])
    assert finite.all()
    weight[7] = 3 * hidden[-1]
    assert vocabulary_argmax(hidden, weight, softcap, tiling=tiling)[0][-1] == 7


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
