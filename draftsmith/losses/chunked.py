"""Sums over rows whose intermediates are too large to hold for all rows at once (logits over the vocabulary).

The gradient is formed in the forward, chunk by chunk, while a chunk's intermediates exist, and only the gradients of
the inputs are kept: peak memory is that of one chunk, and nothing is computed twice. Unlike `linear_cross_entropy`,
trainable vocabulary-sized parameters (a low-rank correction's output matrix) are allowed: the row weights must then be
part of the sum, since those parameters' gradient adds up over rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class Chunk:
    """One chunk's share of a sum.

    total: scalar; results: per-row results [m', ...] that carry no gradient. outputs: tensors that autograd has
    recorded, and gradients: the total's with respect to each of them. A chunk may thus compute by hand how its total
    depends on its logits, and leave what lies before them to autograd. Where no gradient is wanted
    (`torch.is_grad_enabled`) both may be empty.
    """

    total: Tensor
    results: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor, ...] = ()

    @classmethod
    def recorded(cls, total: Tensor, results: tuple[Tensor, ...]) -> "Chunk":
        """A chunk whose total autograd has recorded whole."""
        return cls(total, results, (total,), (torch.ones_like(total),))


ComputeChunk = Callable[..., Chunk]
"""(part, *rows of the part, *shared) -> the chunk's share."""


def chunked_sum(
    compute: ComputeChunk, rows: Sequence[Tensor], shared: Sequence[Tensor], *, chunk: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sum of `compute` over chunks of rows, differentiable in `rows` and `shared`.

    rows: tensors [m, ...] with the same m >= 0; shared: tensors that every chunk uses whole; `compute(part,
    *row_chunks, *shared)` gets the slice of rows it is given (to index what needs no gradient) and must not reach other
    trainable tensors. chunk: rows at a time. Returns (sum, float32 scalar; the per-row results of all chunks, joined).
    """
    if chunk < 1:
        raise DraftsmithError(f"the chunk of the vocabulary loss is {chunk} rows; it needs at least 1")
    inputs = (*rows, *shared)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        total, *results = _ChunkedSum.apply(compute, len(rows), chunk, *inputs)
        return total, tuple(results)
    total, results, _ = _run(compute, len(rows), chunk, inputs, needed=())
    return total, results


def _run(
    compute: ComputeChunk, num_rows: int, chunk: int, inputs: Sequence[Tensor], needed: Sequence[int]
) -> tuple[Tensor, tuple[Tensor, ...], dict[int, Tensor]]:
    """The sum, the per-row results, and the gradients of the inputs numbered in `needed`."""
    rows, shared = inputs[:num_rows], inputs[num_rows:]
    count = len(rows[0])
    total = torch.zeros((), dtype=torch.float32, device=rows[0].device)
    results: list[tuple[Tensor, ...]] = []
    gradients = {
        index: torch.zeros(
            inputs[index].shape,
            # Many chunks add up in a shared gradient; each row's own is written once.
            dtype=inputs[index].dtype if index < num_rows else torch.float32,
            device=inputs[index].device,
        )
        for index in needed
    }
    # One empty chunk where there is no row, so that the per-row results have their shapes and dtypes.
    for start in range(0, max(count, 1), chunk):
        part = slice(start, min(start + chunk, count))
        with torch.set_grad_enabled(bool(needed)):
            leaves = [
                tensor.detach().requires_grad_(index in gradients)
                for index, tensor in enumerate((*(row[part] for row in rows), *shared))
            ]
            computed = compute(part, *leaves)
        total += computed.total.detach()
        results.append(tuple(result.detach() for result in computed.results))
        recorded = [
            (output, gradient)
            for output, gradient in zip(computed.outputs, computed.gradients, strict=True)
            if output.requires_grad
        ]
        if not needed or not recorded:
            continue
        outputs, output_gradients = zip(*recorded, strict=True)
        parts = torch.autograd.grad(outputs, [leaves[i] for i in needed], output_gradients, allow_unused=True)
        for index, gradient in zip(needed, parts, strict=True):
            if gradient is None:
                continue
            if index < num_rows:
                gradients[index][part] = gradient
            else:
                gradients[index] += gradient
    return total, tuple(torch.cat(parts) for parts in zip(*results, strict=True)), gradients


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: ComputeChunk, num_rows: int, chunk: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        needed = [index for index, tensor in enumerate(inputs) if tensor.requires_grad]
        total, results, gradients = _run(compute, num_rows, chunk, inputs, needed)
        ctx.save_for_backward(*gradients.values())
        ctx.needed = list(gradients)
        ctx.num_inputs = len(inputs)
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        ctx.mark_non_differentiable(*results)
        return (total, *results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * ctx.num_inputs
        for index, gradient in zip(ctx.needed, ctx.saved_tensors, strict=True):
            gradients[index] = (gradient * grad_outputs[0]).to(ctx.dtypes[index])
        return (None, None, None, *gradients)
