"""The speculators layout: what is written for vLLM, and what may be left out or spelt otherwise when it is read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.directory import read_directory
from draftsmith.drafts.draft import Draft
from draftsmith.layouts import LayoutError, TargetParts
from tests.layouts.drafts import FULL, SLIDING, simple_draft, target_ends

WEIGHTS = "model.safetensors"


@pytest.fixture(params=["dflash", "dflash2", "dspark"])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Draft]:
    draft = simple_draft(request.param, block_size=6, num_taps=3)
    draft.save(tmp_path / "draft", "speculators", target=target_ends())
    return tmp_path / "draft", draft


def edit(directory: Path, network: dict[str, Any] | None = None, **top: Any) -> None:
    """Sets fields; ... removes one."""
    config = json.loads((directory / "config.json").read_text())
    for part, changes in ((config, top), (config["transformer_layer_config"], network or {})):
        part.update(changes)
        for name in [name for name, value in part.items() if value is ...]:
            del part[name]
    (directory / "config.json").write_text(json.dumps(config))


def test_what_vllm_serves_by_itself(saved: tuple[Path, Draft]) -> None:
    directory, draft = saved
    config = json.loads((directory / "config.json").read_text())
    first = draft.config.architecture == "dspark"
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == draft.config.architecture
    assert config["aux_hidden_state_layer_ids"] == [3, 2, 1]  # taps 2, 1, 0
    assert config["sample_from_anchor"] is first
    method = config["speculators_config"]["proposal_methods"][0]
    proposals = algorithm_for(draft.config).block_layout(draft.config).max_proposals
    assert proposals == (6 if first else 5)
    assert method == {"proposal_type": "greedy", "speculative_tokens": proposals, "verifier_accept_k": 1}
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "organisation/target",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["draft_vocab_size"] == config["transformer_layer_config"]["vocab_size"] == 61
    # vLLM makes every layer causal where this is false.
    assert config["sliding_window_non_causal"] is True
    tensors = load_file(directory / WEIGHTS)
    assert torch.equal(tensors["embed_tokens.weight"], target_ends().embedding)
    assert torch.equal(tensors["lm_head.weight"], target_ends().output_head)
    assert not {"t2d", "d2t"} & set(tensors)


def test_a_tied_target_is_written_twice(tmp_path: Path) -> None:
    weight = torch.randn(61, 20)
    draft = simple_draft("dflash", dtype="bfloat16")
    draft.save(tmp_path / "draft", "speculators", target=TargetParts(None, (), weight, weight))
    tensors = load_file(tmp_path / "draft" / WEIGHTS)
    assert torch.equal(tensors["embed_tokens.weight"], weight.bfloat16())
    assert torch.equal(tensors["lm_head.weight"], weight.bfloat16())


def test_ends_of_another_target_are_refused(tmp_path: Path) -> None:
    weight = torch.randn(62, 20)
    with pytest.raises(LayoutError, match=r"the target's embedding is \[62, 20\]; this draft wants \[61, 20\]"):
        simple_draft("dflash").save(tmp_path / "x", "speculators", target=TargetParts(None, (), weight, weight))


def test_fields_that_equal_their_writers_defaults_are_left_out(saved: tuple[Path, Draft]) -> None:
    directory, draft = saved
    edit(directory, {"hidden_act": ..., "rms_norm_eps": ..., "initializer_range": ..., "layer_types": ...})
    loaded = Draft.load(directory)
    assert loaded.config.meaning() == draft.config.meaning()
    notes = read_directory(directory).notes
    assert any("leaves out hidden_act = 'silu', rms_norm_eps = 1e-06, initializer_range = 0.02" in n for n in notes)


@pytest.mark.parametrize(
    ("architecture", "field", "causal"),
    [("dflash", ..., True), ("dflash", True, False), ("dflash2", ..., False), ("dflash2", False, True)],
)
def test_causality_of_sliding_layers(tmp_path: Path, architecture: str, field: Any, causal: bool) -> None:
    draft = simple_draft(architecture, layer_types=(SLIDING, SLIDING), sliding_window=4)
    draft.save(tmp_path / "draft", "speculators", target=target_ends())
    edit(tmp_path / "draft", sliding_window_non_causal=field)
    kinds = Draft.load(tmp_path / "draft").attention_kinds
    assert [(kind.window, kind.causal) for kind in kinds] == [(4, causal)] * 2
    edit(tmp_path / "draft", {"layer_types": [FULL, SLIDING]})
    kinds = Draft.load(tmp_path / "draft").attention_kinds
    assert [(kind.window, kind.causal) for kind in kinds] == [(None, False), (4, causal)]


@pytest.mark.parametrize(
    ("network", "top", "said"),
    [
        (
            {},
            {"draft_vocab_size": 32},
            "draft_vocab_size is 32, but vocab_size is 61; drafts over a reduced vocabulary",
        ),
        ({}, {"num_target_layers": ...}, "num_target_layers is missing.*add the target's number of layers"),
        ({}, {"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'; allowed: 'dflash'"),
        ({}, {"aux_hidden_state_layer_ids": [0, 1, 2]}, "allowed: ids >= 1, since 0 is the embedding"),
        ({"model_type": "llama"}, {}, "model_type 'qwen3'"),
        ({"sample_from_anchor": 3}, {"sample_from_anchor": ...}, "sample_from_anchor is 3; allowed for"),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, {}, "rope_theta is missing"),
        # Numbers that draftsmith does not compute.
        ({"attention_bias": True}, {}, "attention_bias is True; allowed: False"),
        ({}, {"quantization_config": {"bits": 4}}, "quantization_config is .*; allowed: none"),
        ({"logit_scale": 3.0}, {}, r"logit_scale is 3\.0; allowed: 1\.0"),
        ({}, {"use_gemma_norm": True}, "use_gemma_norm is True"),
        ({}, {"target_hidden_size": 21}, "target_hidden_size is 21, but hidden_size is 20"),
        # The same field beside the section, with another value.
        ({}, {"layer_types": [SLIDING, SLIDING]}, "layer_types is .*full_attention.* but layer_types is .*sliding_att"),
        ({"sliding_window": 4}, {"sliding_window": 5}, "sliding_window is 4 but sliding_window is 5"),
        ({}, {"use_sliding_window": True}, "use_sliding_window is False but use_sliding_window is True"),
        ({}, {"hidden_size": 21}, "hidden_size is 20 but hidden_size is 21"),
        ({}, {"rope_theta": 1e6}, r"rope: rope_theta is 5000\.0, but 1000000\.0 in the top level"),
        (
            {},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "is 'default', but 'linear' in the top",
        ),
        ({"attention_mode": "mla"}, {}, "attention_mode is 'mla'; allowed: 'gqa', 'mha'"),
        ({}, {"text_config": {"layer_types": [SLIDING]}}, "text_config is .*; allowed: none"),
        ({}, {"speculators_model_type": ["dflash"]}, r"speculators_model_type is \['dflash'\]; allowed"),
    ],
)
def test_what_cannot_be_known_or_is_not_computed_is_refused(
    saved: tuple[Path, Draft], network: dict[str, Any], top: dict[str, Any], said: str
) -> None:
    edit(saved[0], network, **top)
    with pytest.raises(LayoutError, match=said):
        read_directory(saved[0])


def test_unknown_fields_are_errors_or_notes(saved: tuple[Path, Draft]) -> None:
    directory, draft = saved
    assert read_directory(directory, strict=True).notes == []
    edit(directory, {"use_swa": True, "mask_tokn_id": None}, final_logit_softcapping=20.0)
    named = "config.json has transformer_layer_config.use_swa = True, final_logit_softcapping = 20.0, which"
    with pytest.raises(LayoutError, match=f"{re.escape(named)} no draft of architecture '{draft.config.architecture}'"):
        Draft.load(directory, strict=True)
    assert read_directory(directory).notes == [f"{named} draftsmith does not know and does not apply"]
    assert Draft.load(directory).config.meaning() == draft.config.meaning()


def test_what_the_layouts_own_writer_adds_is_known(saved: tuple[Path, Draft]) -> None:
    """Fields of a `config.json` by speculators 0.9.0 that draftsmith does not write."""
    directory, draft = saved
    edit(
        directory,
        {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None, "use_cache": True, "transformers_version": "5"},
        auto_map={"": "config.DFlashSpeculatorConfig"},
        speculators_version="0.9.0",
        target_hidden_size=None,
        transformers_version="5.19.0",
    )
    read = read_directory(directory, strict=True)
    assert read.notes == []
    assert Draft.load(directory, strict=True).config.meaning() == draft.config.meaning()


def test_the_anchors_slot_is_as_in_the_method(saved: tuple[Path, Draft]) -> None:
    directory, draft = saved
    edit(directory, sample_from_anchor=draft.config.architecture != "dspark")
    with pytest.raises(LayoutError, match=r"sample_from_anchor is .*; allowed for"):
        read_directory(directory)
    edit(directory, sample_from_anchor=...)
    read = read_directory(directory)
    assert DraftConfig.parse(read.config).meaning() == draft.config.meaning()
    told = ["sample_from_anchor is left out: the layout's writer reads that as true, which is done here, vLLM as false"]
    assert read.notes == (told if draft.config.architecture == "dspark" else [])


def test_identity_maps_are_reported_and_left_out(saved: tuple[Path, Draft]) -> None:
    directory, draft = saved
    maps = {"t2d": torch.ones(61, dtype=torch.bool), "d2t": torch.zeros(61, dtype=torch.int64)}
    save_file(load_file(directory / WEIGHTS) | maps, directory / WEIGHTS)
    assert read_directory(directory).ignored == ["d2t", "embed_tokens.weight", "lm_head.weight", "t2d"]
    assert Draft.load(directory).config.meaning() == draft.config.meaning()


def sliding(directory: Path) -> Draft:
    """A written draft whose every layer slides, with YaRN."""
    yarn = {"rope_theta": 7e5, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    draft = simple_draft("dflash", layer_types=(SLIDING, SLIDING), sliding_window=4, rope=yarn)
    draft.save(directory, "speculators", target=target_ends())
    return draft


MOVABLE = (
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "attention_bias",
)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(moved=st.sets(st.sampled_from(MOVABLE)), repeated=st.sets(st.sampled_from(MOVABLE)), strict=st.booleans())
def test_fields_mean_the_same_beside_the_section(
    tmp_path_factory: pytest.TempPathFactory, moved: set[str], repeated: set[str], strict: bool
) -> None:
    """Sliding layers beside `transformer_layer_config` were read as full ones, and another rope as the default one."""
    directory = tmp_path_factory.mktemp("moved") / "draft"
    draft = sliding(directory)
    config = json.loads((directory / "config.json").read_text())
    network = config["transformer_layer_config"]
    config |= {name: network[name] for name in moved | repeated if name in network}
    for name in moved:
        network.pop(name, None)
    (directory / "config.json").write_text(json.dumps(config))
    read = read_directory(directory, strict=strict)
    assert read.notes == []
    assert DraftConfig.parse(read.config).meaning() == draft.config.meaning()


def test_sinks_are_read_with_their_tensors(saved: tuple[Path, Draft]) -> None:
    directory, draft = saved
    sinks = {f"layers.{i}.self_attn.attention_sink_bias": torch.ones(4) for i in range(2)}
    save_file(load_file(directory / WEIGHTS) | sinks, directory / WEIGHTS)
    assert Draft.load(directory).config.meaning() == draft.config.replace(attention_sinks=True).meaning()
    edit(directory, attention_sink_bias=False)
    with pytest.raises(LayoutError, match="attention_sink_bias is False, but the weights file holds"):
        Draft.load(directory)
