"""Which hidden state a tap id means, and what a tapped forward does not run."""

import pytest
import torch
from torch import nn

from draftsmith.errors import DraftsmithError
from draftsmith.layouts.layer_ids import from_layer_input_ids, to_layer_input_ids
from draftsmith.targets.taps import check_tap_ids, default_tap_ids
from tests.support.tiny import KINDS, tiny_target


@pytest.mark.parametrize(
    ("num_layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (30, 5, (1, 8, 14, 20, 27)),
        (4, 1, (2,)),
        (1, 1, (0,)),
        (28, 3, (1, 13, 25)),
        (5, 2, (1, 2)),
    ],
)
def test_default_ids(num_layers, count, ids):
    assert default_tap_ids(num_layers, count) == ids


@pytest.mark.parametrize(("num_layers", "count"), [(3, 2), (4, 2), (6, 4), (36, 0), (36, -1)])
def test_default_ids_that_do_not_exist(num_layers, count):
    with pytest.raises(DraftsmithError, match="tap"):
        default_tap_ids(num_layers, count)


def test_as_many_default_ids_as_the_error_promises():
    assert default_tap_ids(6, 3) == (1, 2, 3)


@pytest.mark.parametrize(
    ("ids", "message"), [((), "empty"), ((1, 4), r"\[4\].*0 to 3"), ((-1,), r"\[-1\]"), ((2, 1, 2), r"repeats \[2\]")]
)
def test_ids_that_are_refused(ids, message):
    with pytest.raises(DraftsmithError, match=message):
        check_tap_ids(ids, 4)


def test_ids_in_the_other_convention():
    assert to_layer_input_ids((1, 9, 17)) == [2, 10, 18]
    assert from_layer_input_ids((2, 10, 18)) == [1, 9, 17]


def _inputs(batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 97, (batch, width)), torch.arange(width).expand(batch, -1)


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_taps_are_the_models_own_hidden_states_in_the_order_asked_for(kind):
    target = tiny_target(kind)
    ids, positions = _inputs(2, 13)
    reference = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    taps = target.forward(ids, positions, tap_ids=(2, 0)).taps
    torch.testing.assert_close(taps, torch.cat([reference[3], reference[1]], dim=-1), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layers_tap_is_not_normed(kind):
    target = tiny_target(kind)
    ids, positions = _inputs(2, 11)
    states = target.forward(ids, positions, tap_ids=(3,))
    normed = target.model.get_decoder().norm(states.taps)
    torch.testing.assert_close(normed, states.final_state, rtol=0, atol=0)
    assert not torch.allclose(states.taps, states.final_state, atol=1e-2)


def _calls(modules: dict[str, nn.Module]) -> list[str]:
    """Fills with the names of the modules that run from now on."""
    called: list[str] = []
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _module, _args, name=name: called.append(name))
    return called


def _watched(target) -> list[str]:
    decoder = target.model.get_decoder()
    layers = {str(i): layer for i, layer in enumerate(decoder.layers)}
    return _calls(layers | {"norm": decoder.norm, "head": target.model.get_output_embeddings()})


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_runs_above_the_last_layer_needed(kind):
    target = tiny_target(kind, num_layers=5)
    called = _watched(target)
    states = target.forward(*_inputs(2, 9), tap_ids=(2, 1), final_state=False)
    assert called == ["0", "1", "2"]
    assert states.final_state is None


def test_the_final_state_needs_every_layer_and_no_head():
    target = tiny_target("llama")
    called = _watched(target)
    states = target.forward(*_inputs(2, 9), tap_ids=(1,))
    assert called == ["0", "1", "2", "3", "norm"]
    assert states.final_state is not None


def test_no_hook_stays_behind():
    target = tiny_target("llama")
    hooks = [len(layer._forward_hooks) for layer in target.model.get_decoder().layers]
    ids, positions = _inputs(1, 7)
    target.forward(ids, positions, tap_ids=(1,), final_state=False)
    with pytest.raises(IndexError):
        target.forward(ids + 10_000, positions, tap_ids=(1,))
    assert [len(layer._forward_hooks) for layer in target.model.get_decoder().layers] == hooks


def test_asking_for_nothing_or_for_layers_that_are_not_there():
    target = tiny_target("llama")
    with pytest.raises(DraftsmithError, match="computes nothing"):
        target.forward(*_inputs(1, 3), final_state=False)
    with pytest.raises(DraftsmithError, match="not layers of the target"):
        target.forward(*_inputs(1, 3), tap_ids=(4,))


def test_taps_of_a_padded_batch_are_those_of_each_row_alone():
    target = tiny_target("mistral")
    ids, positions = _inputs(3, 17)
    lengths = [17, 5, 11]
    batched = target.forward(ids, positions, tap_ids=(0, 3), final_state=False).taps
    for row, length in enumerate(lengths):
        alone = target.forward(ids[row : row + 1, :length], positions[:1, :length], tap_ids=(0, 3)).taps
        torch.testing.assert_close(batched[row, :length], alone[0], rtol=1e-4, atol=1e-5)
