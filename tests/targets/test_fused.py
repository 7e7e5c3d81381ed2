"""The fused decoder: the model's own results, with its weights in its own hands, on plain operations and on kernels."""

import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.device import interpreted
from draftsmith.targets.passes import CachedPass
from draftsmith.targets.target import Target
from tests.support.tiny import KINDS, tiny_model, tiny_target

OVERRIDES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "gemma3": {"attn_logit_softcapping": 3.0, "attn_implementation": "eager"},
}


def _target(kind: str, **overrides) -> Target:
    return tiny_target(kind, **{**OVERRIDES.get(kind, {}), **overrides})


def _run(target: Target, ids: Tensor, edges: tuple[int, ...] = (0, 13, 14, 19, 24)) -> tuple[Tensor, Tensor, list]:
    """Final states, taps and cache of three rows that run in pieces, each row at its own offset from the second on."""
    cache = target.new_cache(3, 40)
    finals, taps = [], []
    for low, high in itertools.pairwise(edges):
        positions = torch.arange(low, high).repeat(3, 1)
        states = target.forward(ids[:, low:high], positions, tap_ids=(2, 0), cache=cache.view(high))
        finals.append(states.final_state)
        taps.append(states.taps)
    return torch.cat(finals, 1), torch.cat(taps, 1), [*cache.tensors]


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_fused_equals_the_models_own_code(kind):
    target = _target(kind)
    ids = torch.randint(0, 97, (3, 24))
    logits = target.model(input_ids=ids).logits
    expected = _run(target, ids)
    target.fuse()
    assert target.fused
    found = _run(target, ids)
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    # The model's own code reads the joined weights, and goes on giving what it gave.
    torch.testing.assert_close(target.model(input_ids=ids).logits, logits, rtol=0, atol=0)
    target.fuse()  # a second time changes nothing
    torch.testing.assert_close(_run(target, ids)[0], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_weights_are_moved_and_not_copied(kind):
    target = _target(kind)
    before = sum(parameter.numel() for parameter in target.model.parameters())
    target.fuse()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in target.model.parameters()}
    assert sum(storages.values()) == 4 * before
    attention = target.model.model.layers[2].self_attn
    with torch.no_grad():
        ids = torch.randint(0, 97, (3, 24))
        kept = _run(target, ids)[0]
        attention.v_proj.weight[0, 0] += 1.0  # the model's own parameter is what the fused decoder reads
    assert not torch.allclose(_run(target, ids)[0], kept, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_kernels_equal_plain_operations(kind):
    """Half precision, so that the products of few rows run through their kernel, in Triton's interpreter."""
    overrides = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_key_value_heads": 1,
        "dtype": torch.float16,
        "initializer_range": 0.1,
    }
    target = _target(kind, **overrides)
    target.fuse()
    ids, positions = torch.randint(0, 97, (1, 3)), torch.tensor([[6, 7, 7]])

    def run() -> tuple[Tensor, dict[int, Tensor]]:
        return target._fused.forward(target.ends.embed(ids), CachedPass(target.new_cache(1, 16), positions), (0, 1))

    expected = run()
    with interpreted():
        found = run()
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=2e-2)
    for tap in (0, 1):
        torch.testing.assert_close(found[1][tap], expected[1][tap], rtol=2e-2, atol=2e-2)


def _odd_layer(target: Target) -> None:
    layer = target.model.model.layers[0]
    layer.__class__ = type("OddLayer", (type(layer),), {})


def _wrapped(target: Target) -> None:
    attention = target.model.model.layers[1].self_attn
    attention.o_proj = torch.nn.Sequential(attention.o_proj)


def _quantised(target: Target) -> None:
    """As quantisers do it that leave the layer a linear one: the weight is a tensor of another kind."""
    kind = type("PackedTensor", (Tensor,), {})
    mlp = target.model.model.layers[2].mlp
    mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight.detach().as_subclass(kind))


def _rounded_inputs(target):
    """As activations of 8 bits are read."""
    layer = target.model.model.layers[1].mlp.gate_proj
    layer.register_forward_pre_hook(lambda module, args: ((args[0] * 16).round() / 16,))


def _own_forward(target):
    layer = target.model.model.layers[0].self_attn.k_proj
    own = layer.forward
    layer.forward = lambda x: own((x * 16).round() / 16)


def _biased_in_part(target: Target) -> None:
    projection = target.model.model.layers[3].self_attn.k_proj
    projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))


def _wider_in_part(target: Target) -> None:
    projection = target.model.model.layers[0].mlp.up_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().double())


def _another_epsilon(target: Target) -> None:
    target.model.model.norm.variance_epsilon = 1e-3


def _without_a_norm(target: Target) -> None:
    target.model.model.layers[1].input_layernorm = torch.nn.Identity()


def _another_norm(target: Target) -> None:
    layer = target.model.model.layers[2]
    layer.post_attention_layernorm = torch.nn.LayerNorm(target.hidden_size, eps=1e-6)


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
NOT_FUSED: list[tuple[dict[str, Any], Callable[[Target], None] | None, str]] = [
    ({"hidden_act": "relu"}, None, "its activation is 'relu'; allowed: 'silu', 'gelu_pytorch_tanh'"),
    (DYNAMIC, None, "its rope of type 'dynamic' depends on the length of the text"),
    ({}, _odd_layer, "its layers are of kind LlamaDecoderLayer, OddLayer; allowed: all of one kind of Gemma3"),
    ({}, _wrapped, "layer 1: o_proj is a Sequential; allowed: a plain linear layer"),
    ({}, _quantised, "layer 2: down_proj holds a PackedTensor; allowed: a plain parameter"),
    ({}, _rounded_inputs, "layer 1: gate_proj runs code of its own around its product; allowed: a plain linear layer"),
    ({}, _own_forward, "layer 0: k_proj runs code of its own around its product"),
    ({}, _biased_in_part, "layer 3: q_proj, k_proj, v_proj have a bias in part"),
    ({}, _wider_in_part, "layer 0: gate_proj, up_proj are of several dtypes"),
    ({}, _without_a_norm, "layer 1: input_layernorm is of kind Identity; allowed: an RMS norm"),
    ({}, _another_norm, "layer 2: post_attention_layernorm is of kind LayerNorm; allowed: an RMS norm"),
    ({}, _another_epsilon, "its norms have the epsilons 0.001, 1e-06; allowed: one for all"),
]


class OnCuda(Target):
    """A target that says it is on a GPU; nothing is launched on it here."""

    device = property(lambda self: torch.device("cuda"))


@pytest.mark.parametrize(("options", "change", "said"), NOT_FUSED, ids=[said[:30] for _, _, said in NOT_FUSED])
def test_what_cannot_be_fused_is_refused_on_request_and_left_alone_by_itself(options, change, said, caplog):
    target = tiny_target("llama", **options)
    if change is not None:
        change(target)
    with pytest.raises(DraftsmithError, match=f"{re.escape(said)}.*Set target.fuse to 'auto' or 'off'"):
        target.fuse()
    assert not target.fused
    target.__class__ = OnCuda
    assert not target._fuses_by_itself()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is not fused, so that its own code decodes: " + said in caplog.text


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_what_can_be_fused_is_on_a_gpu_by_itself(kind, caplog):
    target = _target(kind)
    assert not target._fuses_by_itself()  # on a CPU
    target.__class__ = OnCuda
    assert target._fuses_by_itself()
    assert not caplog.records


def test_the_activation_of_experts_is_their_own_codes():
    target = tiny_target("qwen3_moe", hidden_act="relu", mlp_only_layers=[])
    target.fuse()
    assert target.fused


def test_without_triton_both_ways_out_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    target = tiny_target("llama")
    with pytest.raises(DraftsmithError, match=r"needs the package triton.*pip install.*or set target.fuse to 'off'"):
        target.fuse()
    target.__class__ = OnCuda
    with pytest.raises(DraftsmithError, match="needs the package triton"):
        target._fuses_by_itself()


def test_a_fusion_that_changes_results_is_refused():
    target = Target.from_model(tiny_model("llama"))
    layer = target.model.model.layers[1]
    own = layer.mlp.forward
    layer.mlp.forward = lambda x: 1.5 * own(x)  # something that only the model's own code knows of
    with pytest.raises(DraftsmithError, match=r"other states fused.*Set target.fuse to 'off'.*report"):
        target.fuse()


def test_a_cache_past_the_angle_tables_is_refused():
    target = tiny_target("llama")
    target.fuse()
    with pytest.raises(DraftsmithError, match="rope is known for 768"):
        target.forward(torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64),
                       cache=target.new_cache(1, 769))  # fmt: skip


def test_loading_fuses_on_request(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    assert Target.load(tmp_path, fuse="on").fused
    assert not Target.load(tmp_path).fused  # auto, on a CPU
    assert not Target.load(tmp_path, fuse="off").fused
    with pytest.raises(DraftsmithError, match="fuse is 'yes'; allowed: 'auto', 'on', 'off'"):
        Target.load(tmp_path, fuse="yes")


def test_deep_half_precision_is_compared_layer_by_layer():
    """Roundings of sixteen layers add up to more than a wrong scale in one of them; within a layer they do not."""
    target = tiny_target("qwen3", num_layers=16, dtype=torch.bfloat16, initializer_range=0.3)
    target.fuse()
    wrong = tiny_target("qwen3", num_layers=16, dtype=torch.bfloat16, initializer_range=0.3)
    layer = wrong.model.model.layers[15].mlp
    own = layer.forward
    layer.forward = lambda x: 1.3 * own(x)
    with pytest.raises(DraftsmithError, match="layer 15 of Qwen3Model"):
        wrong.fuse()
