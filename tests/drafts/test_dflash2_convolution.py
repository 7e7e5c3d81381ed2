"""DFlash 2's convolution against its equation, written out element by element."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafts.checks import DraftConfigError
from draftsmith.drafts.convolution import BlockConvolution, convolve
from draftsmith.drafts.draft import Draft
from tests.support.tiny_draft import tiny_draft


def plain(hidden: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """hidden [B, H], base [K, H], delta [B, K, groups] -> [B, H]."""
    (slots, channels), (taps, groups) = hidden.shape, delta.shape[-2:]
    rows = []
    for t in range(slots):
        for c in range(channels):
            total = torch.zeros(())
            for i in range(taps):
                if t - i >= 0:
                    total = total + (base[i, c] + delta[t, i, c // (channels // groups)]) * hidden[t - i, c]
            rows.append(total)
    return torch.stack(rows).view(slots, channels)


@pytest.mark.parametrize(
    ("taps", "groups", "width", "slots"), [(2, 3, 4, 7), (1, 1, 5, 2), (4, 2, 3, 3), (3, 5, 1, 1), (2, 2, 16, 15)]
)
def test_it_equals_the_equation_in_value_and_gradient(taps: int, groups: int, width: int, slots: int) -> None:
    hidden = torch.randn(2, 3, slots, groups * width, requires_grad=True)
    base = torch.randn(taps, groups * width, requires_grad=True)
    delta = torch.randn(2, 3, slots, taps, groups, requires_grad=True)
    found = convolve(hidden, base, delta)
    wanted = torch.stack([torch.stack([plain(hidden[r, n], base, delta[r, n]) for n in range(3)]) for r in range(2)])
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(found)
    inputs = (hidden, base, delta)
    for a, b in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        moved = delta.clone()
        moved[1, 2, -1, 0, 0] += 1.0
        assert not torch.allclose(convolve(hidden, base, moved), found)


def random_convolution(hidden_size: int = 12, taps: int = 3, group_size: int = 4) -> BlockConvolution:
    module = BlockConvolution(hidden_size, taps, group_size)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@torch.no_grad()
def test_the_first_half_of_the_projection_is_used_before_and_the_second_after() -> None:
    module, hidden, inner = random_convolution(), torch.randn(1, 2, 5, 12), torch.randn(1, 2, 5, 12)
    before, state = module.before(hidden)
    after = module.after(inner, state)
    deltas = (hidden @ module.kernel_projection.weight.T).view(
        1, 2, 5, 2, 3, 3
    )  # [R, N, B, (before, after), K, groups]
    for n in range(2):
        torch.testing.assert_close(before[0, n], plain(hidden[0, n], module.base_kernel[0], deltas[0, n, :, 0]))
        torch.testing.assert_close(after[0, n], plain(inner[0, n], module.base_kernel[1], deltas[0, n, :, 1]))


@torch.no_grad()
def test_nothing_crosses_the_edge_of_a_block_or_runs_backwards() -> None:
    module, hidden = random_convolution(), torch.randn(2, 3, 6, 12)
    before, state = module.before(hidden)
    changed = hidden.clone()
    changed[0, 1, 3] += 1.0
    other, other_state = module.before(changed)
    moved = (other != before).any(-1)
    expected = torch.zeros(2, 3, 6, dtype=torch.bool)
    expected[0, 1, 3:] = True  # 3 taps: slots 3, 4 and 5
    assert torch.equal(moved, expected)
    assert torch.equal(module.after(changed, state)[0, 2], module.after(hidden, other_state)[0, 2])


@torch.no_grad()
def test_a_fresh_one_changes_nothing() -> None:
    module, hidden = BlockConvolution(12, 2, 4), torch.randn(2, 3, 6, 12)
    for parameter in module.parameters():
        parameter.fill_(float("nan"))
    module.reset_parameters()
    before, state = module.before(hidden)
    assert torch.equal(before, hidden)
    assert torch.equal(module.after(hidden, state), hidden)


# --- as part of a draft -----------------------------------------------------------------------------------------------


class Sizes:
    hidden_size, num_layers, vocab_size = 32, 4, 61


HEAD: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 5}


def test_a_fresh_draft_is_dflash_and_every_parameter_is_set() -> None:
    plain_draft = tiny_draft(Sizes, block_size=5)
    config = plain_draft.config.replace(architecture="dflash2", head=HEAD)
    torch.manual_seed(3)
    draft = Draft.from_config(config)
    assert all(parameter.isfinite().all() for parameter in draft.parameters())
    torch.manual_seed(3)
    again = Draft.from_config(config)
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))
    kept = {name: tensor for name, tensor in draft.state_dict().items() if name in plain_draft.state_dict()}
    plain_draft.load_state_dict(kept)
    assert len(draft.state_dict()) == len(kept) + 2 * 4 + 3
    hidden = torch.randn(1, 2, 5, 32)
    for layer, other in zip(draft.backbone.layers, plain_draft.backbone.layers, strict=True):
        assert layer.attention_conv is not None
        assert layer.mlp_conv is not None
        inner, state = layer.mlp_conv.before(hidden)
        assert torch.equal(layer.mlp_conv.after(layer.mlp(inner), state), other.mlp(hidden))


FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    *[({name: None}, [f"but {name} is missing", "allowed: both"]) for name in HEAD],
    *[({name: ...}, [f"but {name} is missing", "allowed: both"]) for name in HEAD],
    ({"conv_kernel_size": ..., "conv_group_size": ...}, ["conv_kernel_size is missing", "conv_group_size is missing"]),
    ({"selector_rank": ..., "selector_top_k": ...}, ["selector_rank is missing", "selector_top_k is missing"]),
    *[({name: bad}, [f"{name} is {bad!r}", ">= 1"]) for name in HEAD for bad in (0, -2, True, 2.0, "4")],
    ({"conv_group_size": 5}, ["conv_group_size is 5", "divisor of hidden_size", "32"]),
    ({"conv_group_size": 64}, ["conv_group_size is 64", "divisor of hidden_size", "32"]),
    ({"conv_kernel_size": 6}, ["conv_kernel_size is 6", "1 to 5", "block_size"]),
    ({"selector_top_k": 62}, ["selector_top_k is 62", "1 to 61", "vocab_size"]),
    ({"conv_kernel": 2}, ["unknown field 'conv_kernel'", "conv_kernel_size"]),
]


@pytest.mark.parametrize(("change", "said"), FAULTS, ids=[str(change) for change, _ in FAULTS])
def test_a_fault_is_named_with_value_and_what_is_allowed(change: dict[str, Any], said: list[str]) -> None:
    head = {name: value for name, value in {**HEAD, **change}.items() if value is not ...}
    with pytest.raises(DraftConfigError) as raised:
        tiny_draft(Sizes, block_size=5, architecture="dflash2", head=head)
    for part in said:
        assert part in str(raised.value)


def test_the_largest_sizes_are_taken() -> None:
    head = {"conv_kernel_size": 5, "conv_group_size": 32, "selector_rank": 1, "selector_top_k": 61}
    tiny_draft(Sizes, block_size=5, architecture="dflash2", head=head)
