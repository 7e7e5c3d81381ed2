"""Losses of rows of logits by hand equal autograd's; the Triton kernels equal the references."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from draftsmith.kernels.vocabulary import softmax_rows

CASES = [(5, 37), (3, 4099)]  # the second takes more than one block of the kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU, kernels run in Triton's interpreter


def _case(m, width, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + m)
    logits, correction, teacher = (3 * torch.randn(m, width, generator=generator, dtype=dtype) for _ in range(3))
    labels = torch.randint(width, (m,), generator=generator)
    labels[1] = -1
    weights, base_weights, distance_weights = torch.rand(3, m, generator=generator, dtype=torch.float32)
    return logits, correction, teacher, labels, weights, base_weights, distance_weights


def _autograd(logits, correction, teacher, labels, weights, base_weights, distance_weights):
    logits, correction = logits.clone().requires_grad_(), correction.clone().requires_grad_()
    counted, final = labels >= 0, logits + correction

    def cross_entropy(x):
        return functional.cross_entropy(x, labels.clamp_min(0), reduction="none") * counted

    l1 = (final.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    terms = cross_entropy(final) * weights + cross_entropy(logits) * base_weights + l1 * distance_weights * counted
    of_logits, of_correction = torch.autograd.grad(terms.sum(), (logits, correction))
    return cross_entropy(final), l1, final.argmax(-1), of_correction, of_logits


def _by_hand(logits, correction, teacher, labels, weights, base_weights, distance_weights):
    base_lse, _, _ = softmax_rows.statistics_reference(logits, None, labels)
    lse, losses, best = softmax_rows.statistics_reference(logits, correction, labels)
    teacher_lse, _, _ = softmax_rows.statistics_reference(teacher, None, labels)
    l1, lean = softmax_rows.distance_reference(logits, correction, teacher, lse, teacher_lse)
    found = softmax_rows.gradient_reference(
        logits,
        correction,
        labels,
        lse,
        weights,
        base=(base_lse, base_weights),
        teacher=(teacher, teacher_lse, lean, distance_weights),
    )
    return losses, l1, best, *found


@pytest.mark.parametrize(("m", "width"), CASES)
def test_by_hand_equals_autograd(m, width):
    case = _case(m, width)
    for found, wanted in zip(_by_hand(*case), _autograd(*case), strict=True):
        torch.testing.assert_close(found, wanted)


def test_bf16_stays_near_float64():
    logits, correction, teacher, *rest = _case(6, 400)
    rounded = [t.bfloat16() for t in (logits, correction, teacher)]
    found, wanted = _by_hand(*rounded, *rest), _autograd(*(t.double() for t in rounded), *rest)
    assert found[3].dtype == torch.bfloat16
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() <= 1e-2 * other.double().norm()


def test_a_row_depends_on_itself_alone_and_ties_go_to_the_lowest_column():
    case = _case(4, 50)
    before = _by_hand(*case)
    case[0][2, 7] += 2.0
    after = _by_hand(*case)
    for index in (0, 1, 3, 4):
        differs = (before[index] != after[index]).reshape(4, -1).any(-1)
        assert differs.tolist() == [False, False, True, False], index
    tied = torch.zeros(2, 9)
    tied[1, [3, 8]] = 1.0
    assert softmax_rows.statistics_reference(tied, None, torch.tensor([0, 1]))[2].tolist() == [0, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("m", "width"), CASES)
def test_the_kernels_equal_the_references(m, width, dtype):
    logits, correction, teacher, labels, *weights = (t.to(DEVICE) for t in _case(m, width, torch.float32))
    logits, correction, teacher = (t.to(dtype) for t in (logits, correction, teacher))
    for other in (None, correction):
        wanted = softmax_rows.statistics_reference(logits, other, labels)
        _close(softmax_rows.statistics(logits, other, labels), wanted)
        teacher_lse, _, _ = softmax_rows.statistics_reference(teacher, None, labels)
        distances = softmax_rows.distance_reference(logits, other, teacher, wanted[0], teacher_lse)
        _close(softmax_rows.distance(logits, other, teacher, wanted[0], teacher_lse), distances)
        base = (softmax_rows.statistics_reference(logits, None, labels)[0], weights[1])
        taught = (teacher, teacher_lse, distances[1], weights[2])
        for with_base, with_teacher in ((None, None), (base, None), (None, taught), (base, taught)):
            arguments = (logits, other, labels, wanted[0], weights[0])
            options = {"base": with_base, "teacher": with_teacher}
            one = softmax_rows.gradient(*arguments, **options)
            two = softmax_rows.gradient_reference(*arguments, **options)
            assert (one[1] is None) == (two[1] is None)
            _close([t for t in one if t is not None], [t for t in two if t is not None])
            assert not one[0][1].any()  # the row without a label
            # Mutated: another label of a row moves that row's gradient and no other's.
            labels[0] = (labels[0] + 1) % width
            moved = (softmax_rows.gradient(*arguments, **options)[0] != one[0]).any(-1)
            labels[0] = (labels[0] - 1) % width
            assert moved.tolist() == [True] + [False] * (m - 1)


def test_ties_go_to_the_lowest_column_across_the_kernels_blocks():
    tied = torch.zeros(2, 5000, device=DEVICE)
    tied[1, [4500, 4098]] = 1.0
    assert softmax_rows.statistics(tied, None, torch.tensor([0, 1], device=DEVICE))[2].tolist() == [0, 4098]


def _close(found, wanted):
    for one, two in zip(found, wanted, strict=True):
        tolerance = 2e-3 if two.dtype == torch.float16 else 2e-5
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)
