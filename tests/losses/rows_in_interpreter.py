"""Compares the Triton kernels of the row losses with their references; for a process with TRITON_INTERPRET=1."""

import torch

from draftsmith.kernels import softmax_rows
from draftsmith.losses import rows
from tests.losses.test_rows import CASES, _case


def main() -> None:
    for m, width in CASES:
        for dtype in (torch.float32, torch.float16):
            logits, correction, teacher, labels, *weights = _case(m, width, torch.float32)
            logits, correction, teacher = (t.to(dtype) for t in (logits, correction, teacher))
            for other in (None, correction):
                wanted = rows.statistics_reference(logits, other, labels)
                found = softmax_rows.statistics(logits, other, labels)
                _close(found, wanted)
                teacher_lse, _, _ = rows.statistics_reference(teacher, None, labels)
                distances = rows.distance_reference(logits, other, teacher, wanted[0], teacher_lse)
                _close(softmax_rows.distance(logits, other, teacher, wanted[0], teacher_lse), distances)
                base = (rows.statistics_reference(logits, None, labels)[0], weights[1])
                taught = (teacher, teacher_lse, distances[1], weights[2])
                for with_base, with_teacher in ((None, None), (base, None), (None, taught), (base, taught)):
                    arguments = (logits, other, labels, wanted[0], weights[0])
                    options = {"base": with_base, "teacher": with_teacher}
                    one = softmax_rows.gradient(*arguments, **options)
                    two = rows.gradient_reference(*arguments, **options)
                    assert (one[1] is None) == (two[1] is None)
                    _close([t for t in one if t is not None], [t for t in two if t is not None])
                    assert not one[0][1].any()  # the row without a label
    tied = torch.zeros(2, 5000)
    tied[1, [4500, 4098]] = 1.0
    assert softmax_rows.statistics(tied, None, torch.tensor([0, 1]))[2].tolist() == [0, 4098]


def _close(found, wanted):
    for one, two in zip(found, wanted, strict=True):
        tolerance = 2e-3 if two.dtype == torch.float16 else 2e-5
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)


if __name__ == "__main__":
    main()
