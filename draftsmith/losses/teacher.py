"""Losses against the target's own distribution, the teacher's, over the vocabulary in chunks of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.kernels.vocabulary.softmax_rows import distance, gradient, statistics
from draftsmith.losses.chunked import Chunk, chunked_sum


@dataclass(frozen=True)
class TeacherLosses:
    """Row by row [m], without gradient: the two losses in float32, and the most likely tokens (int64, ties to the
    lowest id) of the unary and of the final logits.

    l1 = sum_v |softmax(final)_v - softmax(teacher)_v|, in [0, 2]. Half of it is the total variation distance d, and
    1 - d the chance that rejection sampling accepts a token that is drawn from the one and checked against the other
    (Leviathan et al., 2211.17192).
    """

    cross_entropy: Tensor
    l1: Tensor
    unary_ids: Tensor
    predicted_ids: Tensor


def cross_entropy_and_l1(
    rows: Sequence[Tensor],
    shared: Sequence[Tensor],
    logits: Callable[..., tuple[Tensor, Tensor]],
    teacher_logits: Callable[[slice], Tensor],
    labels: Tensor,
    weights: Tensor,
    *,
    cross_entropy_weight: float,
    l1_weight: float,
    chunk: int,
) -> tuple[Tensor, TeacherLosses]:
    """sum_i weights_i * (cross_entropy_weight * CE_i + l1_weight * L1_i), differentiable in `rows` and `shared`.

    rows, shared, chunk: as for `chunked_sum`. logits(*rows of a chunk, *shared) -> (unary [m', V], correction [m', V]),
    whose sum are the final logits, which are trained; teacher_logits(part) -> [m', V], those of the target for the rows
    of `part`; labels [m] int64, -1 for rows that do not count; weights [m] float32. Both sides exist for one chunk of
    rows at a time.
    """

    def compute(part: slice, *inputs: Tensor) -> Chunk:
        outputs = logits(*inputs)
        unary, correction = (output.detach() for output in outputs)
        part_labels, part_weights = labels[part], weights[part]
        with torch.no_grad():
            teacher = teacher_logits(part)
            _, _, unary_ids = statistics(unary, None, part_labels)
            lse, cross_entropy, predicted_ids = statistics(unary, correction, part_labels)
            teacher_lse, _, _ = statistics(teacher, None, part_labels)
            l1, lean = distance(unary, correction, teacher, lse, teacher_lse)
            total = (part_weights * (cross_entropy_weight * cross_entropy + l1_weight * l1)).sum()
        results = (cross_entropy, l1, unary_ids, predicted_ids)
        if not torch.is_grad_enabled():
            return Chunk(total, results)
        found, _ = gradient(
            unary,
            correction,
            part_labels,
            lse,
            part_weights * cross_entropy_weight,
            teacher=(teacher, teacher_lse, lean, part_weights * l1_weight),
        )
        return Chunk(total, results, outputs, (found, found.to(correction.dtype)))

    total, results = chunked_sum(compute, rows, shared, chunk=chunk)
    return total, TeacherLosses(*results)
