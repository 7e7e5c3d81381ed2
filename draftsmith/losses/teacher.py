"""Losses against the target's own distribution, the teacher's, over the vocabulary in chunks of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.losses.chunked import chunked_sum


def l1_to_teacher(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """sum_v |softmax(logits)_v - softmax(teacher_logits)_v|, in [0, 2]: [..., V] both -> [...] float32.

    Half of it is the total variation distance d, and 1 - d the chance that rejection sampling accepts a token that is
    drawn from the one and checked against the other (Leviathan et al., 2211.17192).
    """
    return (logits.float().softmax(-1) - teacher_logits.float().softmax(-1)).abs().sum(-1)


@dataclass(frozen=True)
class TeacherLosses:
    """Row by row [m], without gradient: the two losses in float32, and the most likely tokens (int64, ties to the
    lowest id) of the unary and of the final logits."""

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

    rows, shared, chunk: as for `chunked_sum`. logits(*rows of a chunk, *shared) -> (unary [m', V], final [m', V]), of
    which the final ones are trained; teacher_logits(part) -> [m', V], those of the target for the rows of `part`;
    labels [m] int64; weights [m] float32. Both sides exist for one chunk of rows at a time.
    """

    def compute(part: slice, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        unary, final = logits(*inputs)
        with torch.no_grad():
            teacher = teacher_logits(part)
        cross_entropy = functional.cross_entropy(final.float(), labels[part], reduction="none")
        l1 = l1_to_teacher(final, teacher)
        total = (weights[part] * (cross_entropy_weight * cross_entropy + l1_weight * l1)).sum()
        return total, (cross_entropy, l1, unary.argmax(-1), final.argmax(-1))

    total, results = chunked_sum(compute, rows, shared, chunk=chunk)
    return total, TeacherLosses(*results)
