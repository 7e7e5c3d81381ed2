"""Softmaxes over the vocabulary, row by row: what a loss needs of the logits, and its gradient.

Logits come in two parts that are added in fp32 (`correction` may be absent): those of an output head, and a low-rank
correction of them. A row is read in blocks; nothing of the vocabulary's width is written but the gradient.

Everywhere: logits [m, V] of any float dtype, or logits plus `correction` [m, V], which are added in fp32 at least;
labels [m] int64, -1 for a row without one, whose losses are 0 and whose gradient is 0. Nothing here is recorded by
autograd: gradients are computed as such.
"""

from typing import Any

import torch
from torch import Tensor

from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.triton import tl, triton

BLOCK = 4096
PER = 16
WARPS = 8

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


# --- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, correction_ptr, labels_ptr, lse_ptr, loss_ptr, best_ptr, width,
    HAS_CORRECTION: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    correction_ptr += row * width
    # A lane reads PER columns that lie side by side. It keeps its own largest value (a number from the beginning, since
    # -inf less -inf is none) and the sum of exponentials relative to that: lanes meet at the end only.
    columns = PER * tl.arange(0, BLOCK // PER)[:, None] + tl.arange(0, PER)[None, :]
    highest = tl.full((BLOCK // PER, PER), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK // PER, PER), tl.int32)
    total = tl.zeros((BLOCK // PER,), tl.float32)
    top = tl.full((BLOCK // PER,), -3.0e38, tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(logits_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        if HAS_CORRECTION:
            x += tl.load(correction_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        higher = x > highest
        place = tl.where(higher, start + columns, place)
        highest = tl.where(higher, x, highest)
        raised = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp(top - raised) + tl.sum(tl.exp(x - raised[:, None]), 1)
        top = raised
    largest = tl.max(top, 0)
    lse = largest + tl.log(tl.sum(total * tl.exp(top - largest), 0))
    # Ties go to the lowest column. A row without a finite maximum (NaN) has no best column; 0 stands there.
    first = tl.where(highest == tl.max(tl.max(highest, 1), 0), place, width)
    best = tl.min(tl.min(first, 1), 0)
    best = tl.where(best < width, best, 0)
    tl.store(lse_ptr + row, lse)
    tl.store(best_ptr + row, best.to(tl.int64))
    label = tl.load(labels_ptr + row)
    counted = label >= 0
    at = tl.load(logits_ptr + label, mask=counted, other=0.0).to(tl.float32)
    if HAS_CORRECTION:
        at += tl.load(correction_ptr + label, mask=counted, other=0.0).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(counted, lse - at, 0.0))


@triton.jit
def _distance_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, correction_ptr, teacher_ptr, lse_ptr, teacher_lse_ptr, distance_ptr, lean_ptr, width,
    HAS_CORRECTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    correction_ptr += row * width
    teacher_ptr += row * width
    columns = tl.arange(0, BLOCK)
    lse = tl.load(lse_ptr + row)
    teacher_lse = tl.load(teacher_lse_ptr + row)
    distance = tl.zeros((BLOCK,), tl.float32)
    lean = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(logits_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        if HAS_CORRECTION:
            x += tl.load(correction_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(teacher_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(x - lse)
        difference = p - tl.exp(t - teacher_lse)
        distance += tl.abs(difference)
        lean += tl.where(difference > 0, p, tl.where(difference < 0, -p, 0.0))
    tl.store(distance_ptr + row, tl.sum(distance, 0))
    tl.store(lean_ptr + row, tl.sum(lean, 0))


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, correction_ptr, teacher_ptr, labels_ptr,
    lse_ptr, base_lse_ptr, teacher_lse_ptr, lean_ptr,
    weight_ptr, base_weight_ptr, distance_weight_ptr,
    out_ptr, base_out_ptr, width,
    HAS_CORRECTION: tl.constexpr, HAS_BASE: tl.constexpr, HAS_TEACHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    correction_ptr += row * width
    teacher_ptr += row * width
    out_ptr += row * width
    base_out_ptr += row * width
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    inside = columns < width
    label = tl.load(labels_ptr + row)
    counted = (label >= 0).to(tl.float32)
    weight = tl.load(weight_ptr + row) * counted
    hot = columns == label
    base = tl.load(logits_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = base
    if HAS_CORRECTION:
        x += tl.load(correction_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    p = tl.exp(x - tl.load(lse_ptr + row))
    gradient = weight * tl.where(hot, p - 1.0, p)
    if HAS_TEACHER:
        t = tl.load(teacher_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        difference = p - tl.exp(t - tl.load(teacher_lse_ptr + row))
        sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
        gradient += counted * tl.load(distance_weight_ptr + row) * p * (sign - tl.load(lean_ptr + row))
    tl.store(out_ptr + columns, gradient.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_BASE:
        q = tl.exp(base - tl.load(base_lse_ptr + row))
        both = gradient + counted * tl.load(base_weight_ptr + row) * tl.where(hot, q - 1.0, q)
        tl.store(base_out_ptr + columns, both.to(base_out_ptr.dtype.element_ty), mask=inside)


def _check(*tensors: Tensor | None) -> None:
    given = [tensor for tensor in tensors if tensor is not None]
    for tensor in given:
        if not tensor.is_contiguous() or tensor.shape != given[0].shape:
            raise ValueError(
                f"rows of logits must be contiguous and of one shape; found {[(t.shape, t.stride()) for t in given]}"
            )


def statistics(logits: Tensor, correction: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log of the softmax's denominator [m], cross-entropy [m], both float32 at least; the most likely column [m]
    int64, ties to the lowest)."""
    if not uses_kernels(logits):
        return statistics_reference(logits, correction, labels)
    _check(logits, correction)
    rows, width = logits.shape
    lse, losses = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _statistics_kernel[(rows,)](
            logits, logits if correction is None else correction, labels, lse, losses, best, width,
            HAS_CORRECTION=correction is not None, BLOCK=BLOCK, PER=PER, num_warps=WARPS,
        )  # fmt: skip
    return lse, losses, best


def distance(
    logits: Tensor, correction: Tensor | None, teacher: Tensor, lse: Tensor, teacher_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """(sum_v |p_v - t_v| [m], sum_v sign(p_v - t_v) p_v [m]), both float32 at least.

    p and t are the softmaxes of the logits and of teacher [m, V], lse and teacher_lse [m] as from `statistics`. The
    first is the L1 distance; the second is what its gradient needs.
    """
    if not uses_kernels(logits):
        return distance_reference(logits, correction, teacher, lse, teacher_lse)
    _check(logits, correction, teacher)
    rows, width = logits.shape
    found, lean = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        _distance_kernel[(rows,)](
            logits, logits if correction is None else correction, teacher, lse, teacher_lse, found, lean, width,
            HAS_CORRECTION=correction is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return found, lean


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
    if not uses_kernels(logits):
        return gradient_reference(logits, correction, labels, lse, weights, base=base, teacher=teacher)
    _check(logits, correction, teacher[0] if teacher is not None else None)
    rows, width = logits.shape
    out = torch.empty_like(logits)
    base_out = torch.empty_like(logits) if base is not None else None
    if rows:
        # Arguments of what is absent are never read; any pointer will do.
        base_lse, base_weights = base if base is not None else (lse, weights)
        teacher_logits, teacher_lse, lean, distance_weights = teacher or (logits, lse, lse, weights)
        grid: Any = (rows, triton.cdiv(width, BLOCK))
        _gradient_kernel[grid](
            logits, logits if correction is None else correction, teacher_logits, labels,
            lse, base_lse, teacher_lse, lean, weights, base_weights, distance_weights,
            out, out if base_out is None else base_out, width,
            HAS_CORRECTION=correction is not None, HAS_BASE=base is not None, HAS_TEACHER=teacher is not None,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out, base_out
