"""The copies that a forward computes with."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
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
            section=section(),
            target=target,
            source=StoreSource(store),
            run_dir=tmp_path / precision,
            options=options(precision=precision, max_steps=12, lr=3e-3, eval_share=0.0),
            track=QUIET,
        )
        losses.append([entry["loss"] for entry in entries(tmp_path / precision, "train")])
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert losses[0] != losses[1]
    assert losses[1][-1] < losses[1][0] - 0.3


class Stack(nn.Module):
    """Layers whose `k_proj` reads a context as well, before any layer runs."""

    def __init__(self, passed):
        super().__init__()
        self.fc = nn.Linear(5, 5)
        self.layers = nn.ModuleList(nn.ModuleDict({n: nn.Linear(5, 5) for n in ("mlp", "k_proj")}) for _ in range(3))
        self.passed = passed

    def forward(self, x):
        context = [layer["k_proj"](self.fc(x)) for layer in self.layers]
        for number, (layer, keys) in enumerate(zip(self.layers, context, strict=True)):
            x = torch.tanh(layer["mlp"](x) + layer["k_proj"](x) + keys)
            x.register_hook(lambda gradient, number=number: self.passed.append(number))
        return x.float().sum()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_last_layers_gradients_are_there_before_the_first_layers_backward(dtype):
    torch.manual_seed(3)
    passed = []
    net = Stack(passed)
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: passed.append(name))
    weights, zero = working_weights(net, dtype, read_first=("k_proj",))
    (functional_call(net, weights, (torch.randn(4, 5, dtype=dtype or torch.float32),)) + zero).backward()
    layers = [entry for entry in passed if entry in (0, 1, 2) or "mlp.weight" in entry]
    assert layers == [2, "layers.2.mlp.weight", 1, "layers.1.mlp.weight", 0, "layers.0.mlp.weight"]
    assert all("k_proj" in name or "fc" in name for name in passed[-8:])  # the context's, at the end
