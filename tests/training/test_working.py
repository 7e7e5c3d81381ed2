"""The copies that a forward computes with."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from draftsmith.training.run import train
from draftsmith.training.working import working_weights
from tests.training.counting import QUIET, options, section
from tests.training.test_train import entries


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7, bias=number == 1) for number in range(3))
        self.scale = nn.Parameter(torch.rand(7))
        self.table = nn.Embedding(5, 7)
        self.unused = nn.Linear(7, 2)

    def forward(self, ids):
        x = self.table(ids).to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + layer(x)  # each is used twice
        return (x.float() * self.scale).pow(2).sum()


def _loss(net, dtype, ids):
    weights, zero = working_weights(net, dtype)
    return weights, functional_call(net, weights, (ids,)) + zero


def test_gradients_are_those_of_rounded_weights_and_reach_every_parameter():
    torch.manual_seed(0)
    net, ids = Net(), torch.randint(5, (9,))
    weights, loss = _loss(net, torch.bfloat16, ids)
    assert {name for name, weight in weights.items() if weight.dtype == torch.bfloat16} == {
        *(f"layers.{i}.weight" for i in range(3)),
        "layers.1.bias",
        "unused.weight",
        "unused.bias",
    }
    loss.backward()

    rounded = {n: p.detach().to(weights[n].dtype).requires_grad_() for n, p in net.named_parameters()}
    functional_call(net, rounded, (ids,)).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad.dtype == torch.float32
        if name.startswith("unused"):
            assert not parameter.grad.any()
        else:
            torch.testing.assert_close(parameter.grad, rounded[name].grad.float(), rtol=0, atol=0)
            assert parameter.grad.any()


def test_without_a_dtype_nothing_is_copied():
    torch.manual_seed(0)
    net, ids = Net(), torch.randint(5, (9,))
    weights, loss = _loss(net, None, ids)
    assert all(weights[name].data_ptr() == parameter.data_ptr() for name, parameter in net.named_parameters())
    loss.backward()
    found = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad()
    net(ids).backward()
    for name, parameter in net.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.equal(found[name], wanted)


def test_a_changed_weight_changes_the_next_copies():
    net, ids = Net(), torch.randint(5, (9,))
    _, before = _loss(net, torch.bfloat16, ids)
    with torch.no_grad():
        net.layers[2].weight.add_(0.25)
    _, after = _loss(net, torch.bfloat16, ids)
    assert before.item() != after.item()


def test_a_run_in_bf16_follows_one_in_fp32(target, store, tmp_path):
    losses = []
    for precision in ("fp32", "bf16"):
        train(
            draft_section=section(),
            target=target,
            ends=target.ends,
            store=store,
            run_dir=tmp_path / precision,
            options=options(precision=precision, max_steps=12, lr=3e-3, eval_share=0.0),
            track=QUIET,
        )
        losses.append([entry["loss"] for entry in entries(tmp_path / precision, "train")])
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert losses[0] != losses[1]
    assert losses[1][-1] < losses[1][0] - 0.3
