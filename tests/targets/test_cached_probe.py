"""What cannot be decoded is known before anything is decoded, with the reason; it can be captured all the same."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaModel,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from transformers.masking_utils import sliding_window_causal_mask_function

from draftsmith.decoding.engine import Engine
from draftsmith.errors import DraftsmithError
from draftsmith.targets.cached_probe import _other_view
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.target import Target
from tests.support.tiny import KINDS, tiny_model, tiny_target

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def _qwen2_moe(window: int, **fields):
    config = Qwen2MoeConfig(
        **_SIZES, **fields, use_sliding_window=True, sliding_window=window, max_window_layers=3,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config).eval()


def _phimoe(window: int | None):
    return PhimoeForCausalLM(PhimoeConfig(**_SIZES, sliding_window=window, num_local_experts=4)).eval()


def _refused(model, reason: str) -> None:
    target = Target.from_model(model)
    ids, positions = torch.randint(0, 97, (2, 20)), torch.arange(20).expand(2, -1)
    states = target.forward(ids, positions, tap_ids=[0, 1])
    assert torch.isfinite(states.taps).all()
    for ask in (target.check_decoding, lambda: target.new_cache(2, 32), lambda: Engine(target)):
        with pytest.raises(DraftsmithError, match=reason):
            ask()
    again = target.forward(ids, positions, tap_ids=[0, 1])
    torch.testing.assert_close(again.taps, states.taps, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_what_can_be_decoded_is_left_as_it_was(kind, dtype):
    target = tiny_target(kind, dtype=dtype)
    before = target.model.config._attn_implementation
    target.check_decoding()
    assert target.model.config._attn_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [8, 100])
def test_windows_that_only_the_mask_holds(window, dtype):
    """A window of 100 is far beyond the few tokens that are read."""
    reason = f"captured and trained for, but not decoded: its mask hides tokens that are {window} back.*given no window"
    _refused(_qwen2_moe(window).to(dtype), reason + r" \(layers 0, 2\)")
    _refused(_phimoe(window).to(dtype), reason + r" \(layers 0, 1, 2\)")


@pytest.mark.parametrize("window", [256, 300, None])
def test_windows_without_effect_on_the_texts_that_a_target_may_have(window):
    Target.from_model(_phimoe(window)).check_decoding()


def _mask_of_its_own(model):
    """As models do that build their masks themselves: it does not tell where it came from."""

    def copied(module, args, kwargs):
        mask = kwargs["attention_mask"]
        return args, kwargs | {"attention_mask": None if mask is None else mask.clone()}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(copied, with_kwargs=True)


def test_without_a_mask_that_tells_the_configurations_window_counts():
    target = Target.from_model(tiny_model("mistral", sliding_window=100))
    _mask_of_its_own(target.model)
    target.check_decoding()
    target = Target.from_model(_phimoe(100))
    _mask_of_its_own(target.model)
    with pytest.raises(DraftsmithError, match=r"names a window of 100, and its attention function is given None"):
        target.check_decoding()


def test_states_that_depend_on_the_whole_pass():
    model = tiny_model("llama")
    attention = model.model.layers[2].self_attn
    attention.register_forward_hook(lambda module, args, output: (output[0] + output[0].cumsum(1) * 0.01, *output[1:]))
    _refused(model, r"layer 2 \(full_attention\) gives other states over a cache .*different by up to \d+%")


def test_a_scale_that_cached_attention_does_not_get():
    """The whole text is read with another one than the passes over a cache."""
    model = tiny_model("qwen3")
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def forward(*args, **kwargs):
        attention.scaling = 0.5 if model.config._attn_implementation == "sdpa" else 0.4
        return own(*args, **kwargs)

    attention.forward = forward
    _refused(model, r"layer 1 \(full_attention\) gives other states")


def test_layers_that_do_not_pass_arguments_on():
    model = StableLmForCausalLM(StableLmConfig(**_SIZES)).eval()
    _refused(model, "StableLmAttention is not given the arguments that its decoder is called with")


class _OldCode(LlamaModel):
    """As code beside a checkpoint was written once."""

    def forward(self, input_ids=None, position_ids=None, use_cache=None):
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


def test_decoders_with_an_attention_of_their_own():
    model = tiny_model("llama")
    model.model.__class__ = _OldCode
    model.forward = lambda input_ids, use_cache: _logits(model, input_ids)
    _refused(model, "_OldCode has an attention of its own, which takes no other function")


def _logits(model, input_ids):
    class Output:
        logits = model.lm_head(model.model(input_ids).last_hidden_state)

    return Output()


@settings(max_examples=60, deadline=None)
@given(theirs=st.integers(1, 40), ours=st.one_of(st.none(), st.integers(1, 40)), positions=st.integers(2, 40))
def test_views_are_equal_where_no_text_tells_them_apart(theirs, ours, positions):
    class Config:
        max_position_embeddings = positions

    found = _other_view(sliding_window_causal_mask_function(theirs), ours, TargetInfo(Config()), torch.device("cpu"))
    equal = min(theirs, positions) == min(ours or positions, positions)
    assert (found is None) == equal
    if found is not None:
        assert int(re.search(r"that are (\d+) back", found)[1]) == min(theirs, ours or positions)
