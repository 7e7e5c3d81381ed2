"""Losses of rows of logits and their gradients: plain PyTorch, and Triton kernels on a GPU.

Everywhere: logits [m, V] of any float dtype, or logits plus `correction` [m, V], which are added in fp32 at least;
labels [m] int64, -1 for a row without one, whose losses are 0 and whose gradient is 0. Nothing here is recorded by
autograd: gradients are computed as such.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def statistics(logits: Tensor, correction: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log of the softmax's denominator [m], cross-entropy [m], both float32 at least; the most likely column [m]
    int64, ties to the lowest)."""
    return _pick("statistics", statistics_reference, logits)(logits, correction, labels)


def distance(
    logits: Tensor, correction: Tensor | None, teacher: Tensor, lse: Tensor, teacher_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """(sum_v |p_v - t_v| [m], sum_v sign(p_v - t_v) p_v [m]), both float32 at least.

    p and t are the softmaxes of the logits and of teacher [m, V], lse and teacher_lse [m] as from `statistics`. The
    first is the L1 distance; the second is what its gradient needs.
    """
    return _pick("distance", distance_reference, logits)(logits, correction, teacher, lse, teacher_lse)


def gradient(
    logits: Tensor,
    correction: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    weights: Tensor,
    *,
    base: tuple[Tensor, Tensor] | None = None,
    teacher: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of sum_i (weights_i CE_i + base_weights_i CE_base_i + distance_weights_i L1_i), in logits' dtype.

    weights [m]; base: (lse of the logits alone [m], base_weights [m]), for a term of the logits without correction;
    teacher: (teacher logits [m, V], their lse [m], the second result of `distance` [m], distance_weights [m]).
    Returns (the gradient of the corrected logits, which is also the correction's; that of the logits, where a base
    term makes it another, else None).
    """
    picked = _pick("gradient", gradient_reference, logits)
    return picked(logits, correction, labels, lse, weights, base=base, teacher=teacher)


def _pick(name: str, reference: Callable[..., Any], logits: Tensor) -> Callable[..., Any]:
    if logits.device.type != "cuda":
        return reference
    from draftsmith.kernels.vocabulary import softmax_rows  # Triton need not be there without CUDA

    return getattr(softmax_rows, name)


# --- references -----------------------------------------------------------------------------------------------------


def _sum(logits: Tensor, correction: Tensor | None) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if correction is None else wide + correction


def statistics_reference(logits: Tensor, correction: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch for `statistics`."""
    x = _sum(logits, correction)
    lse = x.logsumexp(-1)
    at = x.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return lse, torch.where(labels >= 0, lse - at, 0.0), x.argmax(-1)


def distance_reference(
    logits: Tensor, correction: Tensor | None, teacher: Tensor, lse: Tensor, teacher_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch for `distance`."""
    p = (_sum(logits, correction) - lse.unsqueeze(-1)).exp()
    difference = p - (_sum(teacher, None) - teacher_lse.unsqueeze(-1)).exp()
    return difference.abs().sum(-1), (difference.sign() * p).sum(-1)


def gradient_reference(
    logits: Tensor,
    correction: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    weights: Tensor,
    *,
    base: tuple[Tensor, Tensor] | None = None,
    teacher: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Plain PyTorch for `gradient`."""
    counted = labels >= 0
    p = (_sum(logits, correction) - lse.unsqueeze(-1)).exp()
    found = _cross_entropy_gradient(p, labels, weights * counted)
    if teacher is not None:
        teacher_logits, teacher_lse, lean, distance_weights = teacher
        difference = p - (_sum(teacher_logits, None) - teacher_lse.unsqueeze(-1)).exp()
        found += (distance_weights * counted).unsqueeze(-1) * p * (difference.sign() - lean.unsqueeze(-1))
    if base is None:
        return found.to(logits.dtype), None
    base_lse, base_weights = base
    q = (_sum(logits, None) - base_lse.unsqueeze(-1)).exp()
    both = found + _cross_entropy_gradient(q, labels, base_weights * counted)
    return found.to(logits.dtype), both.to(logits.dtype)


def _cross_entropy_gradient(p: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """weights * (p - one_hot(labels)), [m, V]."""
    weights = weights.to(p.dtype).unsqueeze(-1)
    return (p * weights).scatter_add(-1, labels.clamp_min(0).unsqueeze(-1), -weights)
