"""Losses of rows of logits by hand equal autograd's; the Triton kernels equal the references."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from draftsmith.losses import rows

CASES = [(5, 37), (3, 4099)]  # the second takes more than one block of the kernels


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
    base_lse, _, _ = rows.statistics(logits, None, labels)
    lse, losses, best = rows.statistics(logits, correction, labels)
    teacher_lse, _, _ = rows.statistics(teacher, None, labels)
    l1, lean = rows.distance(logits, correction, teacher, lse, teacher_lse)
    found = rows.gradient(
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
    assert rows.statistics(tied, None, torch.tensor([0, 1]))[2].tolist() == [0, 3]


def test_the_kernels_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.losses.rows_in_interpreter"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
