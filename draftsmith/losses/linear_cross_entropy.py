"""Cross-entropy over the vocabulary without ever holding the logits of all rows.

The target's output head is frozen, so the only gradient wanted is that of the hidden states, and a row's loss depends
on its own hidden state alone. The gradient of every row is therefore formed in the forward, chunk by chunk, while that
chunk's logits exist; the backward merely scales each row by the gradient of its loss. This holds for any weighting of
the rows, including weights that are only known once the losses are. Peak memory is two [chunk, V] tensors in the
logits' dtype.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.vocabulary.softmax_rows import gradient, statistics

_CHUNK_BYTES = 1 << 29


def rows_at_a_time(vocab_size: int, dtype: torch.dtype) -> int:
    """How many rows of logits to hold at a time: a power of two, at most half a GiB of them (and at least 64 rows).

    Fewer would leave a large GPU partly idle in the product with the head's transpose, which has few columns.
    """
    rows = _CHUNK_BYTES // (vocab_size * dtype.itemsize)
    return max(64, 1 << max(rows, 1).bit_length() - 1)


def labelled_first(mask: Tensor, count: int | None) -> Tensor:
    """Indices into `mask`, flattened: those where it is True first, in order; `count` of them in all.

    mask bool; count: no less than the mask holds, known to the host without asking the device (None: asked). Where it
    is more, indices of other entries follow. On the CPU, where it costs nothing, `DraftsmithError` if it is less.
    """
    flat = mask.flatten()
    if count is None or flat.device.type == "cpu":
        found = int(flat.sum())
        if count is not None and count < found:
            raise DraftsmithError(f"a mask holds {found} labels, and at most {count} were announced (max_labels)")
        count = found if count is None else count
    return flat.logical_not().to(torch.uint8).argsort(stable=True)[:count]


def linear_cross_entropy(
    hidden: Tensor,
    project: Callable[[Tensor], Tensor],
    labels: Tensor,
    mask: Tensor,
    *,
    chunk: int = 1024,
    max_labels: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and argmax of `project(hidden)`, row by row.

    hidden [..., H] floating; project: rows [m, H] -> logits [m, V], each row by itself and without trainable parameters
    (the target's head, scaling, soft-cap); labels [...] int64; mask [...] bool: rows where it is False cost no work in
    the head, have loss 0 and no gradient; chunk: rows projected at a time; max_labels: at least as many as the mask
    holds, where the host knows (None: it waits for the device to tell).
    Returns (loss [...] float32, differentiable in `hidden`; predicted [...] int64, ties to the lowest id, 0 where the
    mask is False). The softmax is taken in float32 whatever the dtype of the logits.
    """
    if chunk < 1:
        raise DraftsmithError(f"the chunk of the vocabulary loss is {chunk} rows; it needs at least 1")
    rows = labelled_first(mask, max_labels)  # [m]
    selected = hidden.flatten(0, -2).index_select(0, rows)  # [m, H]
    counted = mask.flatten()[rows]
    selected_labels = torch.where(counted, labels.flatten()[rows], -1)
    if selected.requires_grad and torch.is_grad_enabled():
        _check_frozen(project, selected)
        row_losses, row_predicted = _RowLosses.apply(selected, project, selected_labels, chunk)
    else:
        row_losses, row_predicted, _ = _forward(selected, project, selected_labels, chunk, with_gradient=False)
    loss = torch.zeros(mask.numel(), dtype=torch.float32, device=hidden.device).index_copy(0, rows, row_losses)
    predicted = torch.zeros_like(labels).flatten().index_copy(0, rows, row_predicted * counted)
    return loss.view(mask.shape), predicted.view(mask.shape)


def _check_frozen(project: Callable[[Tensor], Tensor], selected: Tensor) -> None:
    if project(selected[:0].detach()).requires_grad:
        raise DraftsmithError(
            "linear_cross_entropy was given a projection with trainable parameters, whose gradient it would lose; "
            "freeze them (requires_grad_(False)) or use a loss that keeps the projection in the graph"
        )


def _forward(
    hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, chunk: int, *, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """hidden [m, H], labels [m], -1 for none -> losses [m] float32, argmax [m], d loss_i / d hidden_i [m, H] if
    asked."""
    losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
    predicted = torch.empty_like(labels)
    hidden_gradient = torch.empty_like(hidden) if with_gradient else None
    ones = torch.ones_like(losses)
    for start in range(0, len(labels), chunk):
        part = slice(start, start + chunk)
        with torch.set_grad_enabled(with_gradient):
            leaf = hidden[part].detach().requires_grad_(with_gradient)
            logits = project(leaf)  # [m', V]
        found = logits.detach()
        lse, losses[part], predicted[part] = statistics(found, None, labels[part])
        if hidden_gradient is not None:
            # Rows are independent: the gradient of their sum holds each row's own.
            logits_gradient, _ = gradient(found, None, labels[part], lse, ones[part])
            (hidden_gradient[part],) = torch.autograd.grad(logits, leaf, logits_gradient)
    return losses, predicted, hidden_gradient


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        losses, predicted, hidden_gradient = _forward(hidden, project, labels, chunk, with_gradient=True)
        ctx.save_for_backward(hidden_gradient)
        ctx.mark_non_differentiable(predicted)
        return losses, predicted

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (hidden_gradient,) = ctx.saved_tensors
        return (hidden_gradient * grad_outputs[0].unsqueeze(-1)).to(hidden_gradient.dtype), None, None, None
