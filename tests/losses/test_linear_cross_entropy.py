from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.errors import DraftsmithError
from draftsmith.losses.linear_cross_entropy import linear_cross_entropy, rows_at_a_time


def head(weight: Tensor, softcap: float | None) -> Callable[[Tensor], Tensor]:
    def project(hidden: Tensor) -> Tensor:
        logits = hidden @ weight.to(hidden.dtype).T
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    return project


def plain(hidden: Tensor, project: Callable[[Tensor], Tensor], labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    logits = project(hidden)
    losses = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    return losses * mask, logits.argmax(-1) * mask


def case(seed: int, shape: tuple[int, ...] = (3, 5, 7), hidden: int = 13, vocab: int = 57) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, hidden, generator=generator),
        torch.randn(vocab, hidden, generator=generator),
        torch.randint(0, vocab, shape, generator=generator),
        torch.rand(shape, generator=generator) > 0.4,
        torch.rand(shape, generator=generator),
    ]


@pytest.mark.parametrize("chunk", [1, 4, 61, 1024])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_it_equals_the_plain_loss_in_value_and_gradient(chunk: int, softcap: float | None) -> None:
    hidden, weight, labels, mask, weights = case(chunk)
    project = head(weight, softcap)
    ours, reference = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    losses, predicted = linear_cross_entropy(ours, project, labels, mask, chunk=chunk)
    wanted, wanted_predicted = plain(reference, project, labels, mask)
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(predicted, wanted_predicted)
    (losses * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-5, atol=1e-5)
    assert (ours.grad[~mask] == 0).all()
    with torch.no_grad():
        evaluated = linear_cross_entropy(ours, project, labels, mask, chunk=chunk)
    assert torch.equal(evaluated[0], losses)
    assert torch.equal(evaluated[1], predicted)


def test_bf16_hidden_states_agree_with_float64() -> None:
    hidden, weight, labels, mask, weights = case(1, shape=(40,), hidden=64, vocab=301)
    weight = weight / 8
    ours = hidden.bfloat16().requires_grad_()
    losses, _ = linear_cross_entropy(ours, head(weight, None), labels, mask, chunk=9)
    assert losses.dtype == torch.float32
    reference = ours.detach().double().requires_grad_()
    wanted, _ = plain(reference, head(weight.bfloat16(), None), labels, mask)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-2, atol=1e-2)
    (losses * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert ours.grad.dtype == torch.bfloat16
    torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=1e-2, atol=1e-2)


def test_weights_that_follow_from_the_losses_are_constants() -> None:
    hidden, weight, labels, mask, _ = case(2)
    ours, reference = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    losses, _ = linear_cross_entropy(ours, head(weight, None), labels, mask, chunk=8)
    (losses * torch.exp(-losses.detach())).sum().backward()
    wanted, _ = plain(reference, head(weight, None), labels, mask)
    (wanted * torch.exp(-wanted.detach())).sum().backward()
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-5, atol=1e-5)


def test_only_labelled_rows_go_through_the_head_and_no_more_than_a_chunk_at_a_time() -> None:
    hidden, weight, labels, mask, _ = case(3)
    rows: list[int] = []

    def counting(part: Tensor) -> Tensor:
        rows.append(len(part))
        return head(weight, None)(part)

    with torch.no_grad():
        linear_cross_entropy(hidden, counting, labels, mask, chunk=8)
    assert sum(rows) == int(mask.sum())
    assert max(rows) == 8


def test_nothing_of_the_size_of_the_vocabulary_waits_for_the_backward() -> None:
    hidden, weight, labels, mask, _ = case(4, hidden=8, vocab=500)
    hidden.requires_grad_()
    losses, _ = linear_cross_entropy(hidden, head(weight, None), labels, mask, chunk=1000)
    wanted, _ = plain(hidden, head(weight, None), labels, mask)
    assert any(500 in tensor.shape and len(tensor) != 500 for tensor in _graph_tensors(wanted))
    assert not any(500 in tensor.shape for tensor in _graph_tensors(losses))
    assert any(tensor.shape == (int(mask.sum()), 8) for tensor in _graph_tensors(losses))  # the rows' own gradients


def _graph_tensors(root: Tensor) -> list[Tensor]:
    """What the graph below `root` keeps for the backward."""
    found: list[Tensor] = []
    seen, stack = set(), [root.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [t for t in getattr(node, "saved_tensors", ()) if t is not None]
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(value := getattr(node, name), Tensor):
                found.append(value)
        stack += [parent for parent, _ in node.next_functions]
    return found


@pytest.mark.parametrize("change", ["hidden", "label", "weight"])
def test_every_input_matters(change: str) -> None:
    hidden, weight, labels, mask, _ = case(5)
    before, _ = linear_cross_entropy(hidden, head(weight, None), labels, mask, chunk=8)
    index = tuple(mask.nonzero()[0].tolist())
    if change == "hidden":
        hidden[index] += 1.0
    elif change == "label":
        labels[index] = (labels[index] + 1) % 57
    else:
        weight[3] += 1.0
    after, _ = linear_cross_entropy(hidden, head(weight, None), labels, mask, chunk=8)
    assert before[index] != after[index]


def test_a_batch_without_labels_gives_zero_and_a_gradient_of_zeros() -> None:
    hidden, weight, labels, mask, _ = case(6)
    hidden.requires_grad_()
    losses, predicted = linear_cross_entropy(hidden, head(weight, None), labels, torch.zeros_like(mask), chunk=8)
    assert (losses == 0).all()
    assert (predicted == 0).all()
    losses.sum().backward()
    assert (hidden.grad == 0).all()


def test_the_softmax_of_bfloat16_logits_is_taken_in_float32() -> None:
    hidden, weight, labels, mask, _ = case(8)
    project = head(weight.bfloat16(), None)
    losses, _ = linear_cross_entropy(hidden.bfloat16(), project, labels, mask, chunk=8)
    logits = project(hidden.bfloat16())
    expected = torch.nn.functional.cross_entropy(logits.float()[mask], labels[mask], reduction="none")
    assert logits.dtype == torch.bfloat16
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses[mask], expected, atol=1e-6, rtol=1e-6)


def test_ties_go_to_the_lowest_id() -> None:
    weight = torch.zeros(9, 4)
    weight[[5, 2, 7]] = 1.0
    labels = torch.tensor([1, 2])
    _, predicted = linear_cross_entropy(torch.ones(2, 4), head(weight, None), labels, labels > 0, chunk=1)
    assert predicted.tolist() == [2, 2]


def test_what_it_cannot_do_is_refused() -> None:
    hidden, weight, labels, mask, _ = case(7)
    hidden.requires_grad_()
    trainable = head(weight.requires_grad_(), None)
    with pytest.raises(DraftsmithError, match="trainable parameters"):
        linear_cross_entropy(hidden, trainable, labels, mask, chunk=8)
    with pytest.raises(DraftsmithError, match="chunk of the vocabulary loss is 0"):
        linear_cross_entropy(hidden, head(weight.detach(), None), labels, mask, chunk=0)


def test_rows_at_a_time_fill_half_a_gibibyte() -> None:
    assert rows_at_a_time(151_936, torch.bfloat16) == 1024
    assert rows_at_a_time(49_152, torch.bfloat16) == 4096
    assert rows_at_a_time(49_152, torch.float32) == 2048
    assert rows_at_a_time(1 << 32, torch.float32) == 64


def test_labels_that_were_not_announced_are_refused() -> None:
    hidden, weight, labels, mask, _ = case(7)
    project, count = head(weight, None), int(mask.sum())
    exact, _ = linear_cross_entropy(hidden, project, labels, mask, max_labels=count)
    more, _ = linear_cross_entropy(hidden, project, labels, mask, max_labels=count + 3)
    torch.testing.assert_close(exact, more, rtol=0, atol=0)
    with pytest.raises(DraftsmithError, match=f"at most {count - 1} were announced"):
        linear_cross_entropy(hidden, project, labels, mask, max_labels=count - 1)
