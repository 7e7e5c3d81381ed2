"""Checkpoints in few bits: their values with their scales, or a refusal that names what would be left out."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from draftsmith.drafts.convert import convert
from draftsmith.errors import DraftsmithError
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.final_norm import load_final_norm
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.quantised import dequantised, left_unread
from draftsmith.targets.target import Target
from tests.layouts.drafts import simple_draft
from tests.support.checkpoints import WEIGHTS, edit_config, edit_tensors, in_eight_bits, quantised
from tests.support.tiny import tiny_model

_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small Llama in bf16."""
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def _refused_by_everyone(path: Path, message: str) -> None:
    for load in (Target.load, TargetEnds.load, load_final_norm):
        with pytest.raises(DraftsmithError, match=message):
            load(path)
    with pytest.raises(DraftsmithError, match=message):
        TargetInfo.load(TargetOptions(path=str(path)))


def test_a_method_that_transformers_skips_is_refused(checkpoint):
    edit_tensors(checkpoint, quantised("_proj", extra=("input_scale",)))
    edit_config(checkpoint, quantization_config=_MODELOPT)
    _refused_by_everyone(checkpoint, r"quantised by 'modelopt', and transformers .* without its scales: it reads .*fp8")
    edit_config(checkpoint, quantization_config={"quant_method": "exl3", "bits": 4})
    _refused_by_everyone(checkpoint, "quantised by 'exl3'")
    edit_config(checkpoint, quantization_config={"bits": 4})
    _refused_by_everyone(checkpoint, "quantised by None")


def test_modelopts_own_file_is_enough(checkpoint):
    (checkpoint / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    _refused_by_everyone(checkpoint, r"ModelOpt quantised it \(hf_quant_config\.json\)")


def test_scales_that_no_configuration_mentions_are_found_when_the_model_is_loaded(checkpoint):
    edit_tensors(checkpoint, quantised("layers.2.mlp.down_proj"))
    with pytest.raises(
        DraftsmithError, match=r"without 1 tensors .* such as model\.layers\.2\.mlp\.down_proj\.weight_"
    ):
        Target.load(checkpoint)


def test_any_tensor_for_a_module_that_has_weights_counts():
    model = tiny_model("llama")
    assert left_unread(model, ["model.layers.1.self_attn.q_proj.bias"]) == ["model.layers.1.self_attn.q_proj.bias"]
    assert left_unread(model, ["model.norm.offset", "lm_head.weight_scale_2"]) == [
        "lm_head.weight_scale_2",
        "model.norm.offset",
    ]
    moe = tiny_model("qwen3_moe")  # whose experts lie in one tensor
    assert left_unread(moe, ["model.layers.0.mlp.experts.3.up_proj.weight_scale"]) != []


def test_modules_that_the_model_lacks_and_scales_of_caches_do_not_count():
    names = ["mtp.layers.0.mlp.down_proj.weight", "model.layers.4.embed_tokens.weight", "model.layers.4.eh_proj.scales"]
    names += ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_proj.output_scale", "vision.weight"]
    assert left_unread(tiny_model("llama"), names) == []


def test_a_quantised_layers_bias_is_its_quantisers_matter():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.zeros(2, 2, dtype=torch.int32))

    model = nn.ModuleDict({"q_proj": Packed()})
    assert left_unread(model, ["q_proj.bias", "q_proj.g_idx"]) == ["q_proj.g_idx"]


def test_eight_bits_whose_rows_depend_on_each_other_are_refused(checkpoint):
    edit_config(checkpoint, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    _refused_by_everyone(checkpoint, r"LLM\.int8.*depend on the other texts")


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
def test_ends_in_eight_bits_are_read_with_their_scale(checkpoint, scale):
    whole = TargetEnds.load(checkpoint)
    edit_tensors(checkpoint, quantised("lm_head", "embed_tokens", scale=scale))
    stored = load_file(checkpoint / WEIGHTS)["lm_head.weight"]
    assert stored.float().abs().max() == 448
    ends = TargetEnds.load(checkpoint)
    assert ends.head_weight.dtype == torch.bfloat16
    for found, right in ((ends.head_weight, whole.head_weight), (ends.embedding_weight, whole.embedding_weight)):
        assert (found.float() - right.float()).abs().max() < 0.04 * right.float().abs().max()  # 3 bits of mantissa


def test_a_converted_draft_carries_the_head_with_its_scale(tmp_path):
    model = tiny_model("llama", vocab_size=61, hidden_size=20, head_dim=4)
    model.save_pretrained(tmp_path / "target")
    edit_tensors(tmp_path / "target", quantised("lm_head"))
    simple_draft("dflash").save(tmp_path / "draft", "zlab")
    convert(tmp_path / "draft", tmp_path / "out", "speculators", target=str(tmp_path / "target"))
    head = load_file(tmp_path / "out" / WEIGHTS)["lm_head.weight"].float()
    right = model.lm_head.weight.detach()
    assert (head - right).abs().max() < 0.04 * right.abs().max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (quantised("lm_head", extra=("input_scale",)), r"lm_head\.weight as torch\.float8_e4m3fn .*lm_head\.input_sc"),
        (quantised("lm_head", scale="weight_scale_2"), r"beside lm_head\.weight_scale_2"),
        (lambda tensors: tensors | {"lm_head.weight": torch.ones(97, 32, dtype=torch.int8)}, "int8 .* without a scale"),
        (lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e5m2)}, "without a sc"),
        (lambda tensors: tensors | {"lm_head.bias": torch.zeros(97)}, r"beside lm_head\.bias"),
        (lambda tensors: tensors | {"lm_head.weight.absmax": torch.ones(4)}, r"beside lm_head\.weight\.absmax"),
        (lambda tensors: tensors | {"model.embed_tokens.scales": torch.ones(97)}, r"beside model\.embed_tokens\.sc"),
        (
            lambda tensors: quantised("lm_head")(tensors) | {"lm_head.weight_scale": torch.ones(7, 2)},
            r"beside lm_head\.weight_scale",
        ),
    ],
)  # fmt: skip
def test_ends_that_cannot_be_read_for_certain_are_refused(checkpoint, change, message):
    edit_tensors(checkpoint, change)
    with pytest.raises(DraftsmithError, match=message):
        TargetEnds.load(checkpoint)


def test_a_norm_beside_a_scale_is_refused(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors | {"model.norm.scales": torch.ones(32)})
    with pytest.raises(DraftsmithError, match=r"model\.norm\.weight as .* beside model\.norm\.scales"):
        load_final_norm(checkpoint)


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), down=st.integers(1, 4), across=st.integers(1, 4))
def test_every_block_is_multiplied_with_its_own_scale(rows, columns, down, across):
    weight = torch.randn(rows * down, columns * across)
    codes, scales = in_eight_bits(weight, rows, columns)
    found = dequantised(codes, scales)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            scale = scales[row // down, column // across]
            assert found[row, column] == codes[row, column].float() * scale
    assert (found - weight).abs().max() <= 0.04 * weight.abs().max()


def test_scales_by_row_lie_in_one_or_two_dimensions():
    codes, scales = in_eight_bits(torch.randn(6, 4), rows=6)
    assert torch.equal(dequantised(codes, scales), dequantised(codes, scales.flatten()))
    assert dequantised(codes, torch.ones(5)) is None
    assert dequantised(codes, torch.ones(4, 4)) is None


def test_an_adapter_beside_a_model_is_not_left_out(checkpoint, monkeypatch):
    (checkpoint / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    monkeypatch.setattr("draftsmith.targets.location.is_peft_available", lambda: False)
    _refused_by_everyone(checkpoint, r"adapter \(adapter_config\.json\) beside its model.*merge_and_unload.*or install")
    monkeypatch.setattr("draftsmith.targets.location.is_peft_available", lambda: True)  # transformers then applies it
    assert TargetEnds.load(checkpoint).vocab_size == 97


def test_an_adapter_alone_says_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(DraftsmithError, match=r"holds an adapter .* without its model; merge it"):
        Target.load(tmp_path)
