"""Chunked sums equal the same sum taken at once, in value and in every gradient."""

import pytest
import torch

from draftsmith.errors import DraftsmithError
from draftsmith.losses.chunked import Chunk, chunked_sum

ROWS, HIDDEN, RANK, VOCABULARY = 11, 6, 3, 17


def _inputs(dtype=torch.float64, rows=ROWS):
    generator = torch.Generator().manual_seed(rows)
    hidden, low = (torch.randn(rows, width, generator=generator, dtype=dtype) for width in (HIDDEN, RANK))
    out = torch.randn(VOCABULARY, RANK, generator=generator, dtype=dtype)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=dtype)
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator, dtype=dtype)
    return [t.requires_grad_() for t in (hidden, low, out)], head, labels, weights


def _compute(head, labels, weights):
    def compute(part, hidden, low, out):
        logits = hidden @ head.T + low @ out.T
        losses = torch.nn.functional.cross_entropy(logits.float(), labels[part], reduction="none")
        return Chunk.recorded((weights[part] * losses).sum(), (losses, logits.argmax(-1)))

    return compute


@pytest.mark.parametrize("chunk", [1, 4, 11, 50])
def test_equals_the_sum_at_once(chunk):
    inputs, head, labels, weights = _inputs()
    compute = _compute(head, labels, weights)
    whole = compute(slice(0, ROWS), *inputs)
    expected, expected_rows = whole.total, whole.results
    wanted = torch.autograd.grad(3 * expected, inputs)

    total, rows = chunked_sum(compute, inputs[:2], inputs[2:], chunk=chunk)
    found = torch.autograd.grad(3 * total, inputs)
    torch.testing.assert_close(total, expected.float())
    for actual, reference in zip((*rows, *found), (*expected_rows, *wanted), strict=True):
        torch.testing.assert_close(actual, reference.detach(), atol=1e-6, rtol=1e-5)


def test_no_rows_still_gives_shapes_and_zero_gradients():
    inputs, head, labels, weights = _inputs(rows=0)
    total, (losses, predicted) = chunked_sum(_compute(head, labels, weights), inputs[:2], inputs[2:], chunk=4)
    assert total == 0
    assert losses.shape == predicted.shape == (0,)
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(total, inputs))


def test_only_wanted_gradients_and_evaluation():
    inputs, head, labels, weights = _inputs()
    inputs[2] = inputs[2].detach()
    total, _ = chunked_sum(_compute(head, labels, weights), inputs[:2], inputs[2:], chunk=4)
    assert len(torch.autograd.grad(total, inputs[:2])) == 2
    with torch.no_grad():
        again, _ = chunked_sum(_compute(head, labels, weights), inputs[:2], inputs[2:], chunk=4)
    assert not again.requires_grad
    torch.testing.assert_close(again, total.detach())


def test_a_changed_row_changes_its_own_gradient_only():
    inputs, head, labels, weights = _inputs()
    changed = inputs[0].detach().clone()
    changed[5] += 1
    gradients = []
    for hidden in (inputs[0], changed.requires_grad_()):
        total, _ = chunked_sum(_compute(head, labels, weights), (hidden, inputs[1]), inputs[2:], chunk=4)
        gradients.append(torch.autograd.grad(total, hidden)[0])
    differs = (gradients[0] != gradients[1]).any(-1)
    assert differs.tolist() == [row == 5 for row in range(ROWS)]


def test_chunk_of_nothing_is_refused():
    inputs, head, labels, weights = _inputs()
    with pytest.raises(DraftsmithError, match="at least 1"):
        chunked_sum(_compute(head, labels, weights), inputs[:2], inputs[2:], chunk=0)
