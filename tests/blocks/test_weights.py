import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.blocks.weights import (
    continuation_value_weights,
    cumulative_confidence_weights,
    decay_weights,
    dpace_weights,
    uniform_weights,
)

VARIANTS = {
    "full": dpace_weights,
    "cumulative_confidence": cumulative_confidence_weights,
    "continuation_value": continuation_value_weights,
}


def dpace_reference(losses: list[float], mask: list[bool], alpha: float, variant: str) -> list[float]:
    """One block, by the definition."""
    smoothed = [(1 - alpha) * math.exp(-x) + alpha if m else 1.0 for x, m in zip(losses, mask, strict=True)]
    p = [math.prod(smoothed[: k + 1]) for k in range(len(losses))]
    weights = []
    for k, m in enumerate(mask):
        rest = sum(p[j] * mask[j] for j in range(k, len(p)))
        weights.append(m * {"full": rest, "cumulative_confidence": p[k], "continuation_value": rest / p[k]}[variant])
    return weights


@settings(max_examples=40, deadline=None)
@given(st.data())
@pytest.mark.parametrize("variant", VARIANTS)
def test_dpace_equals_its_definition(variant: str, data: st.DataObject) -> None:
    labels = data.draw(st.integers(1, 15))
    losses = data.draw(st.lists(st.floats(0, 12), min_size=labels, max_size=labels))
    mask = data.draw(st.lists(st.booleans(), min_size=labels, max_size=labels))
    alpha = data.draw(st.floats(0.05, 1.0))
    found = VARIANTS[variant](torch.tensor([losses]), torch.tensor([mask]), alpha)
    torch.testing.assert_close(
        found, torch.tensor([dpace_reference(losses, mask, alpha, variant)]), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_dpace_weights_carry_no_gradient_and_follow_the_losses(variant: str) -> None:
    losses = torch.rand(2, 3, 6, requires_grad=True)
    mask = torch.rand(2, 3, 6) > 0.2
    weights = VARIANTS[variant](losses, mask, 0.5)
    assert not weights.requires_grad
    assert (weights[~mask] == 0).all()
    harder = losses.detach().clone()
    harder[..., 3] += 2.0
    assert not torch.equal(weights, VARIANTS[variant](harder, mask, 0.5))


def test_continuation_value_survives_a_chain_that_underflows() -> None:
    losses = torch.full((1, 40), 60.0)
    weights = continuation_value_weights(losses, torch.ones(1, 40, dtype=torch.bool), 1e-3)
    assert weights.isfinite().all()
    torch.testing.assert_close(weights[0, -1], torch.tensor(1.0))
    torch.testing.assert_close(weights[0, 0], torch.tensor(1.0 / (1 - 1e-3)))  # the geometric sum


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 15), st.integers(0, 4), st.floats(0.5, 20.0), st.integers(0, 1000))
def test_decay_counts_from_the_first_label(labels: int, first: int, gamma: float, seed: int) -> None:
    mask = torch.rand(3, labels, generator=torch.Generator().manual_seed(seed)) > 0.3
    mask[:, :first] = False
    found = decay_weights(mask, torch.full((3,), first), gamma)
    for row in range(3):
        for k in range(labels):
            wanted = math.exp(-(k - first) / gamma) if mask[row, k] else 0.0
            assert found[row, k].item() == pytest.approx(wanted, rel=1e-5)


def test_decay_with_a_first_label_for_every_block() -> None:
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, :2] = False
    found = decay_weights(mask, torch.tensor([0, 2]), 4.0)
    torch.testing.assert_close(found[1, 2:], found[0, :3])
    assert found[1, 2] == 1.0


def test_uniform_is_the_mask() -> None:
    mask = torch.rand(4, 3) > 0.5
    assert torch.equal(uniform_weights(mask), mask.float())
