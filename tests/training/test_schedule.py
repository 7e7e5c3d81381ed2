import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from draftsmith.training.options import TrainOptions
from draftsmith.training.schedule import build_optimizer, learning_rate


def test_warm_up_is_linear_and_reaches_the_rate_at_its_last_step():
    options = TrainOptions(lr=0.8, warmup_ratio=0.1)
    assert [learning_rate(step, 40, options) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_cosine_from_the_rate_towards_its_floor():
    options = TrainOptions(lr=2.0, warmup_ratio=0.1, min_lr_ratio=0.25)
    assert learning_rate(10, 100, options) == pytest.approx(2.0)
    assert learning_rate(55, 100, options) == pytest.approx(2.0 * (0.25 + 0.75 * 0.5))
    last = 0.5 * (1 + math.cos(math.pi * 89 / 90))
    assert learning_rate(99, 100, options) == pytest.approx(2.0 * (0.25 + 0.75 * last))


def test_no_step_is_wasted_at_rate_zero():
    for total in (1, 2, 7, 30):
        assert all(learning_rate(step, total, TrainOptions()) > 0 for step in range(total))


def test_only_matrices_decay():
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    optimizer = build_optimizer(module, TrainOptions(lr=0.1, weight_decay=0.5))
    optimizer.step()
    for name, parameter in module.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if parameter.dim() == 2 else before[name]
        torch.testing.assert_close(parameter, expected)


def test_a_step_must_be_a_whole_number_of_forwards():
    with pytest.raises(ValidationError, match="rows_per_step is 6 and rows_per_forward is 4"):
        TrainOptions(rows_per_step=6, rows_per_forward=4)
