"""The z-lab layout: how fields may be spelt, what contradicts, and what is written."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafts.directory import family, read_directory, write_directory
from draftsmith.drafts.heads import HEADS
from draftsmith.layouts import LayoutError
from draftsmith.layouts.spelling import Member
from tests.support.tiny_draft import tiny_draft

TARGET = SimpleNamespace(hidden_size=20, num_layers=5, vocab_size=61)
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_draft(TARGET, layer_types=(FULL, SLIDING), sliding_window=6, causal=True, output_multiplier=0.5).save(
        tmp_path / "draft"
    )
    return tmp_path / "draft"


def edit(directory: Path, nested: dict[str, Any] | None = None, **top: Any) -> None:
    """Sets fields of a config.json; ... removes one."""
    config = json.loads((directory / "config.json").read_text())
    for part, changes in ((config, top), (config.get("dflash_config", {}), nested or {})):
        part.update(changes)
        for name in [name for name, value in part.items() if value is ...]:
            del part[name]
    (directory / "config.json").write_text(json.dumps(config))


def test_what_is_written_is_what_others_read(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["rope_scaling"] is None
    assert config["use_sliding_window"] is True
    assert config["sliding_window"] == 6
    assert config["is_causal"] is True
    assert config["dflash_config"] == {
        "mask_token_id": 60,
        "target_layer_ids": [1, 0],
        "output_multiplier": 0.5,
        "causal": True,
    }
    assert "auto_map" not in config


def test_reading_gives_the_canonical_configuration_back(saved: Path) -> None:
    draft = tiny_draft(TARGET, layer_types=(FULL, SLIDING), sliding_window=6, causal=True, output_multiplier=0.5)
    read = read_directory(saved, strict=True)
    assert read.layout == "zlab"
    assert read.ignored == read.notes == []
    wanted = draft.config.to_dict()
    for name, value in wanted.items():
        default = {"partial_rotary_factor": 1.0} if name == "rope" else {}
        got = read.config.get(name, {"input_embedding_scale": 1.0}.get(name))
        assert (default | got if name == "rope" else got) == value, name


@pytest.mark.parametrize("prefix", ["model.", "dflash_module."])
def test_prefixes_are_taken_off(saved: Path, prefix: str) -> None:
    before = load_file(saved / "model.safetensors")
    extras = {"embed_tokens.weight": torch.ones(61, 20), "t2d": torch.ones(61)}
    save_file({prefix + name: tensor for name, tensor in {**before, **extras}.items()}, saved / "model.safetensors")
    read = read_directory(saved)
    assert set(read.tensors) == set(before)
    assert all(torch.equal(read.tensors[name], before[name]) for name in before)
    assert read.ignored == [f"{prefix}embed_tokens.weight", f"{prefix}t2d"]


def test_one_tensor_under_two_names_is_refused(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    save_file({**tensors, "model.fc.weight": tensors["fc.weight"].clone()}, saved / "model.safetensors")
    with pytest.raises(LayoutError, match=r"both .*fc\.weight"):
        read_directory(saved)


@pytest.mark.parametrize(
    ("nested", "top", "wanted"),
    [
        ({"block_size": 7}, {}, {"block_size": 7}),
        ({"block_size": 9}, {"block_size": ...}, {"block_size": 9}),
        ({"block_size": 9}, {"block_size": None}, {"block_size": 9}),
        ({"mask_token_id": ..., "target_layer_ids": ...}, {"mask_token_id": 5, "target_layer_ids": [2]},
         {"mask_token_id": 5, "target_layer_ids": [2]}),
        ({"causal": ...}, {"is_causal": False}, {"causal": False}),
        ({"causal": ..., "is_causal": True}, {"is_causal": ...}, {"causal": True}),
        ({"final_logit_softcapping": 0}, {}, {"final_logit_softcapping": None}),
        ({"final_logit_softcapping": 20.0, "input_embedding_scale": 3.5}, {},
         {"final_logit_softcapping": 20.0, "input_embedding_scale": 3.5}),
        ({}, {"dtype": ..., "torch_dtype": "torch.float32"}, {"dtype": "float32"}),
        ({}, {"layer_types": ..., "max_window_layers": 1}, {"layer_types": [FULL, SLIDING], "sliding_window": 6}),
        ({}, {"layer_types": ..., "use_sliding_window": False}, {"layer_types": [FULL, FULL], "sliding_window": None}),
        ({}, {"layer_types": [FULL, FULL], "use_sliding_window": False, "sliding_window": 4096},
         {"layer_types": [FULL, FULL], "sliding_window": None}),
        ({}, {"use_sliding_window": ...}, {"sliding_window": 6}),
    ],
)  # fmt: skip
def test_fields_are_read_nested_first_then_at_top_level(
    saved: Path, nested: dict[str, Any], top: dict[str, Any], wanted: dict[str, Any]
) -> None:
    edit(saved, nested, **top)
    config = read_directory(saved).config
    assert {name: config.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("top", "wanted"),
    [
        ({"rope_parameters": ..., "rope_theta": 7e5}, {"rope_theta": 7e5}),
        ({"rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}, "rope_theta": ...},
         {"rope_theta": 3e4, "rope_type": "default"}),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}},
         {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
         {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}),
        ({"rope_parameters": ..., "partial_rotary_factor": 0.5}, {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}),
    ],
)  # fmt: skip
def test_rope_may_be_spelt_either_way(saved: Path, top: dict[str, Any], wanted: dict[str, Any]) -> None:
    edit(saved, **top)
    assert read_directory(saved).config["rope"] == wanted


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"block_size": 9}, {}, ["dflash_config.block_size is 9", "block_size is 7"]),
    ({"mask_token_id": 1}, {"mask_token_id": True}, ["mask_token_id is 1", "mask_token_id is True"]),
    ({"target_layer_ids": [0, 1]}, {"target_layer_ids": [1, 0]}, ["target_layer_ids is [0, 1]", "[1, 0]"]),
    ({"causal": False}, {}, ["dflash_config.causal is False", "is_causal is True"]),
    ({}, {"rope_theta": 10000.0}, ["rope_theta is 5000.0", "10000.0", "top level"]),
    ({}, {"rope_scaling": {"rope_type": "linear", "factor": 2}}, ["rope_type is 'default'", "'linear'"]),
    ({}, {"rope_parameters": ..., "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}},
     ["'linear'", "'yarn'"]),
    ({}, {"rope_parameters": ..., "rope_theta": ...}, ["rope_theta is missing", "no safe default"]),
    ({}, {"rope_parameters": [1]}, ["rope_parameters is [1]", "an object"]),
    ({}, {"rope_parameters": {FULL: {"rope_theta": 1.0}, SLIDING: {"rope_theta": 2.0}}}, ["written by layer type"]),
    ({}, {"torch_dtype": "bfloat16"}, ["dtype is 'float32'", "torch_dtype is 'bfloat16'"]),
    ({}, {"use_sliding_window": False}, ["use_sliding_window is false", "sliding_window is 6"]),
    ({"projector_type": "dominoo"}, {}, ["projector_type is 'dominoo'"]),
    ({}, {"architectures": ["Qwen3ForCausalLM"]}, ["architectures is ['Qwen3ForCausalLM']", "'DFlashDraftModel'"]),
    ({}, {"architectures": "DFlashDraftModel"}, ["architectures is 'DFlashDraftModel'", "a list"]),
    ({}, {"architectures": ...}, ["architectures is []", "'DFlashDraftModel'"]),
    ({}, {"attention_bias": True}, ["attention_bias is True", "False"]),
    ({}, {"quantization_config": {"bits": 4}}, ["quantization_config", "none"]),
    ({}, {"draft_vocab_size": 32}, ["draft_vocab_size is 32", "vocab_size is 61"]),
    ({"attention_sink_bias": True}, {}, ["attention_sink_bias is True", "does not hold"]),
    ({}, {"dflash_config": [1]}, ["dflash_config is [1]", "an object"]),
    ({}, {"dflash_config": ...}, ["no layout that is known", "DFlashDraftModel"]),
]  # fmt: skip


@pytest.mark.parametrize(("nested", "top", "said"), CONTRADICTIONS, ids=[str((n, t)) for n, t, _ in CONTRADICTIONS])
def test_contradictions_and_unknown_kinds_are_refused(
    saved: Path, nested: dict[str, Any], top: dict[str, Any], said: list[str]
) -> None:
    edit(saved, nested, **top)
    with pytest.raises(LayoutError) as raised:
        read_directory(saved)
    for part in (str(saved), *said):
        assert part in str(raised.value)


def test_unknown_fields_of_the_section_are_errors_or_notes(saved: Path) -> None:
    edit(saved, {"mask_tokn_id": 3, "emb_dim": 8})
    named = "config.json has dflash_config.emb_dim = 8, dflash_config.mask_tokn_id = 3, which"
    with pytest.raises(LayoutError, match=f"{re.escape(named)}.*remove"):
        read_directory(saved, strict=True)
    assert named in read_directory(saved).notes[0]
    edit(saved, {"mask_tokn_id": None, "emb_dim": ...}, theirs=5)  # null is absent; the top level may hold anything
    assert read_directory(saved, strict=True).notes == []


def test_a_missing_dtype_is_that_of_the_weights_and_noted(saved: Path) -> None:
    edit(saved, dtype=...)
    read = read_directory(saved)
    assert read.config["dtype"] == "float32"
    assert "declares no dtype" in read.notes[0]


def test_sinks_come_with_their_tensors(tmp_path: Path) -> None:
    tiny_draft(TARGET, attention_sinks=True).save(tmp_path / "draft")
    assert json.loads((tmp_path / "draft/config.json").read_text())["dflash_config"]["attention_sink_bias"] is True
    assert read_directory(tmp_path / "draft", strict=True).config["attention_sinks"] is True
    edit(tmp_path / "draft", {"attention_sink_bias": False})
    with pytest.raises(LayoutError, match="attention_sink_bias is False, but the weights file holds"):
        read_directory(tmp_path / "draft")


def test_a_declared_dtype_that_is_not_held_is_not_written(tmp_path: Path) -> None:
    draft = tiny_draft(TARGET)
    tensors = {name.split(".", 1)[1]: p.detach() for name, p in draft.named_parameters()}
    tensors["norm.weight"] = tensors["norm.weight"].half()
    with pytest.raises(LayoutError, match=r"declared as float32, but norm\.weight"):
        write_directory(tmp_path / "draft", "zlab", draft.config.to_dict(), tensors)
    assert not (tmp_path / "draft").exists()


def test_an_unknown_layout_is_refused(saved: Path) -> None:
    with pytest.raises(LayoutError, match=r"layout is 'z-lab'; allowed: .*'zlab'"):
        read_directory(saved, "z-lab")
    with pytest.raises(LayoutError, match="layout is 'z-lab'"):
        tiny_draft(TARGET).save(saved, layout="z-lab")


def test_every_architecture_has_a_spelling() -> None:
    assert {member.architecture for member in family().members} == set(HEADS)


@pytest.mark.parametrize("member", family().members, ids=lambda member: member.architecture)
def test_every_field_of_a_head_has_a_spelling(member: Member) -> None:
    assert set(member.head) == set(HEADS[member.architecture].model_fields)
