"""Directories as others write them: SpecForge, Model-Optimizer, DeepSpec, pickles on request, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafts.convert import convert
from draftsmith.drafts.directory import read_directory
from draftsmith.drafts.draft import Draft
from draftsmith.layouts import LayoutError
from tests.layouts.drafts import FULL, HEADS, SLIDING, simple_draft, target_ends

WEIGHTS = "model.safetensors"


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def rewrite(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, directory / WEIGHTS)


def assert_reads_as(directory: Path, draft: Draft, layout: str, **options: Any) -> None:
    assert read_directory(directory, **options).layout == layout
    loaded = Draft.load(directory, **options)
    assert loaded.config.meaning() == draft.config.meaning()
    wanted = draft.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


# --- Model-Optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [0, 3, 6])
def test_model_optimizers_dspark_is_flat(tmp_path: Path, head: int) -> None:
    draft = simple_draft("dspark", head)
    draft.save(tmp_path / "draft", "modelopt")
    names = set(load_file(tmp_path / "draft" / WEIGHTS))
    assert {"markov_w1.weight", "markov_w2.weight", "confidence_proj.weight", "confidence_proj.bias"} <= names
    assert not any(name.startswith(("markov_head.", "confidence_head.")) for name in names)
    config = config_of(tmp_path / "draft")
    assert config["dflash_config"]["use_confidence_head"] is True
    assert "enable_confidence_head" not in {*config, *config["dflash_config"]}
    assert_reads_as(tmp_path / "draft", draft, "modelopt")


@pytest.mark.parametrize("causal", [None, True, False])
def test_model_optimizers_window_is_one_for_all_layers(tmp_path: Path, causal: bool | None) -> None:
    draft = simple_draft(
        "dflash", layer_types=(SLIDING, SLIDING), sliding_window=5, causal=causal, attention_sinks=True
    )
    draft.save(tmp_path / "draft", "modelopt")
    config = config_of(tmp_path / "draft")
    assert config["layer_types"] == [FULL, FULL]
    assert config["dflash_config"]["use_swa"] is True
    assert config["dflash_config"]["swa_window_size"] == config["sliding_window"] == 5
    assert config["dflash_config"]["causal"] is (causal is not False)
    assert config["attention_sink_bias"] is config["dflash_config"]["attention_sink_bias"] is True
    assert_reads_as(tmp_path / "draft", draft, "modelopt")


def test_use_swa_without_causality_sees_the_whole_block(tmp_path: Path) -> None:
    simple_draft("dflash").save(tmp_path / "draft")
    config = config_of(tmp_path / "draft")
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 3}
    del config["layer_types"]
    rewrite(tmp_path / "draft", config)
    kinds = Draft.load(tmp_path / "draft", strict=True).attention_kinds
    assert [(kind.window, kind.causal) for kind in kinds] == [(3, False)] * 2
    config["sliding_window"] = 4
    rewrite(tmp_path / "draft", config)
    with pytest.raises(LayoutError, match="swa_window_size is 3, but sliding_window is 4"):
        read_directory(tmp_path / "draft")
    config["dflash_config"]["use_swa"] = "yes"
    rewrite(tmp_path / "draft", config)
    with pytest.raises(LayoutError, match="use_swa is 'yes'; allowed: true, false"):
        read_directory(tmp_path / "draft")


# --- SpecForge ------------------------------------------------------------------------------------------------------


def specforge_export(directory: Path, draft: Draft, architecture: str) -> dict[str, Tensor]:
    """A z-lab directory renamed as SpecForge's `save_pretrained` names things; returns its tensors."""
    draft.save(directory)
    config = config_of(directory)
    config["architectures"] = [architecture]
    for name in ("use_confidence_head", "shift_label"):
        if architecture == "DSparkDraftModel":
            config["dflash_config"].pop(name, None)
    for name in (*HEADS["dspark"][0], "sample_from_anchor"):
        config.pop(name, None)
    config |= {"rope_scaling": None, "use_cache": True, "transformers_version": "5.8.1"}
    rewrite(directory, config)
    return load_file(directory / WEIGHTS)


@pytest.mark.parametrize(
    ("architecture", "class_name"), [("domino", "DominoDraftModel"), ("dspark", "DSparkDraftModel")]
)
def test_specforge_exports(tmp_path: Path, architecture: str, class_name: str) -> None:
    draft = simple_draft(architecture)
    tensors = specforge_export(tmp_path / "draft", draft, class_name)
    assert_reads_as(tmp_path / "draft", draft, "specforge", strict=True)
    heads = ("prefix_gru.", "embed_proj.", "markov_head.", "confidence_head.")
    nested = {("logit_head." + n if n.startswith(heads) else n): t for n, t in tensors.items()}
    assert set(nested) != set(tensors)
    save_file(nested, tmp_path / "draft" / WEIGHTS)
    assert_reads_as(tmp_path / "draft", draft, "specforge", strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_specforge_run_checkpoints(tmp_path: Path, dtype: torch.dtype) -> None:
    draft = simple_draft("dspark", 5, dtype="bfloat16").to(torch.bfloat16)
    tensors = specforge_export(tmp_path / "draft", draft, "DSparkDraftModel")
    (tmp_path / "draft" / WEIGHTS).unlink()
    state = {"draft_state_dict": {n: t.to(dtype) for n, t in tensors.items()}, "global_step": 12, "strategy": "dspark"}
    torch.save(state, tmp_path / "draft/training_state.pt")
    with pytest.raises(LayoutError, match=r"no weights.*training_state\.pt may run code.*--allow-pickle"):
        Draft.load(tmp_path / "draft")
    read = read_directory(tmp_path / "draft", allow_pickle=True)
    assert read.layout == "specforge"
    assert read.config["dtype"] == str(dtype).removeprefix("torch.")
    assert bool(read.notes) is (dtype is torch.float32)  # config.json declares bfloat16
    loaded = Draft.load(tmp_path / "draft", allow_pickle=True)
    assert all(torch.equal(t, draft.state_dict()[n].to(dtype)) for n, t in loaded.state_dict().items())
    assert convert(tmp_path / "draft", tmp_path / "out", "sglang", allow_pickle=True).source_layout == "specforge"


# --- DeepSpec -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [0, 2, 8])
def test_deepspec_drafts_say_everything_at_top_level(tmp_path: Path, head: int) -> None:
    draft = simple_draft("dspark", head)
    draft.save(tmp_path / "draft")
    config = config_of(tmp_path / "draft")
    nested = config.pop("dflash_config")
    config |= {name: nested[name] for name in ("mask_token_id", "target_layer_ids")}
    assert config["sample_from_anchor"] is True
    ends = target_ends()
    extras = {"embed_tokens.weight": ends.embedding, "lm_head.weight": ends.output_head}
    rewrite(tmp_path / "draft", config, load_file(tmp_path / "draft" / WEIGHTS) | extras)
    assert read_directory(tmp_path / "draft").ignored == sorted(extras)
    assert_reads_as(tmp_path / "draft", draft, "deepspec")
    config["sample_from_anchor"] = False
    rewrite(tmp_path / "draft", config)
    with pytest.raises(LayoutError, match="sample_from_anchor is False; allowed: true"):
        read_directory(tmp_path / "draft")


# --- pickles --------------------------------------------------------------------------------------------------------


class _Anything:
    pass


def test_a_pickled_state_dict_is_read_on_request(tmp_path: Path) -> None:
    draft = simple_draft("domino")
    draft.save(tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / WEIGHTS)
    (tmp_path / "draft" / WEIGHTS).unlink()
    torch.save({f"model.{n}": t for n, t in tensors.items()}, tmp_path / "draft/pytorch_model.bin")
    with pytest.raises(LayoutError, match=r"pytorch_model\.bin may run code"):
        Draft.load(tmp_path / "draft")
    assert_reads_as(tmp_path / "draft", draft, "zlab", allow_pickle=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"fc.weight": torch.ones(2), "hook": _Anything()}, "holds more than tensors"),
        (_Anything(), "holds more than tensors"),
        ({"fc.weight": [1.0]}, "holds no state dict"),
        ([torch.ones(2)], "holds no state dict"),
        ({}, "holds no state dict"),
        (None, "or is damaged"),
    ],
    ids=["object inside", "object", "list inside", "list", "empty", "truncated"],
)
def test_pickles_give_tensors_and_nothing_else(tmp_path: Path, content: Any, said: str) -> None:
    simple_draft("dflash").save(tmp_path / "draft")
    (tmp_path / "draft" / WEIGHTS).unlink()
    path = tmp_path / "draft/weights.pt"
    torch.save(content if content is not None else {"fc.weight": torch.ones(500)}, path)
    if content is None:
        path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(LayoutError, match=said):
        Draft.load(tmp_path / "draft", allow_pickle=True)


def test_which_of_several_pickles_is_not_guessed(tmp_path: Path) -> None:
    simple_draft("dflash").save(tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / WEIGHTS)
    torch.save({}, tmp_path / "draft/optimizer.pt")
    Draft.load(tmp_path / "draft", allow_pickle=True)  # safetensors are preferred
    (tmp_path / "draft" / WEIGHTS).unlink()
    torch.save(tensors, tmp_path / "draft/pytorch_model.bin")
    with pytest.raises(LayoutError, match=r"holds optimizer\.pt, pytorch_model\.bin; leave the one"):
        Draft.load(tmp_path / "draft", allow_pickle=True)


# --- what would change the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nested", "top", "said"),
    [
        ({"attention_value_scale": 0.7}, {}, "attention_value_scale is 0.7"),
        ({"sample_from_anchor": True}, {}, "sample_from_anchor is True"),
        ({"use_aux_hidden_state": False}, {}, "use_aux_hidden_state is False"),
        ({}, {"is_neox_style": False}, "is_neox_style is False"),
        ({}, {"use_gemma_norm": True}, "use_gemma_norm is True"),
        ({}, {"logit_scale": 2.0}, "logit_scale is 2.0"),
        ({}, {"target_hidden_size": 21}, "target_hidden_size is 21, but hidden_size is 20"),
        ({}, {"text_config": {"hidden_size": 20}}, "text_config is .*; allowed: none"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 0]}, "layers, counted from one .*2, 1"),
        ({"layer_types": [SLIDING, FULL]}, {}, r"dflash_config\.layer_types is .* but layer_types is"),
        ({"sliding_window": 3, "layer_types": [SLIDING, FULL]}, {"layer_types": None}, "use_sliding_window is false"),
    ],
)
def test_numbers_that_are_not_computed_are_refused(
    tmp_path: Path, nested: dict[str, Any], top: dict[str, Any], said: str
) -> None:
    simple_draft("dflash").save(tmp_path / "draft")
    config = config_of(tmp_path / "draft")
    rewrite(tmp_path / "draft", config | top | {"dflash_config": config["dflash_config"] | nested})
    with pytest.raises(LayoutError, match=said):
        read_directory(tmp_path / "draft")


def test_a_mask_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    simple_draft("dflash").save(tmp_path / "draft")
    (tmp_path / "draft/mask_embedding.pt").write_bytes(b"x")
    with pytest.raises(LayoutError, match=r"holds mask_embedding\.pt"):
        read_directory(tmp_path / "draft")


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        ({"lm_head.weight": torch.ones(32, 20)}, r"lm_head\.weight is \[32, 20\], but vocab_size is 61"),
        ({"t2d": torch.arange(61) % 2 == 0}, "t2d leaves out 30 of 61 tokens"),
        ({"d2t": torch.arange(61).flip(0)}, "d2t maps draft ids to other target ids"),
        ({"d2t": torch.zeros(32, dtype=torch.int64)}, "d2t has 32 ids, but vocab_size is 61"),
        ({"t2d": torch.ones(61, dtype=torch.bool), "d2t": torch.zeros(61, dtype=torch.int64)}, None),
        ({"d2t": torch.arange(61)}, None),
    ],
)
def test_vocabularies_are_whole_or_refused(tmp_path: Path, extras: dict[str, Tensor], said: str | None) -> None:
    simple_draft("dflash").save(tmp_path / "draft")
    rewrite(tmp_path / "draft", config_of(tmp_path / "draft"), load_file(tmp_path / "draft" / WEIGHTS) | extras)
    if said is None:
        assert read_directory(tmp_path / "draft").ignored == sorted(extras)
        return
    with pytest.raises(LayoutError, match=said):
        read_directory(tmp_path / "draft")


@pytest.mark.parametrize("architecture", sorted(HEADS))
@pytest.mark.parametrize(("kv_heads", "mode"), [(2, "gqa"), (4, "gqa"), (1, "gqa"), (4, "mha"), (2, None)])
def test_one_rule_for_the_mode_of_attention(tmp_path: Path, architecture: str, kv_heads: int, mode: str | None) -> None:
    """SpecForge writes it for every method: `gqa` says nothing of the number of heads, `mha` that there are as many."""
    draft = simple_draft(architecture, num_key_value_heads=kv_heads)
    draft.save(tmp_path / "draft")
    config = config_of(tmp_path / "draft")
    rewrite(tmp_path / "draft", config | {"dflash_config": config["dflash_config"] | {"attention_mode": mode}})
    assert Draft.load(tmp_path / "draft", strict=True).config.meaning() == draft.config.meaning()
    for wrong, said in (
        ("mha", "attention_mode is 'mha', but num_attention_heads is 4"),
        ("mla", "keys and values of"),
    ):
        if wrong == "mha" and kv_heads == 4:
            continue
        rewrite(tmp_path / "draft", config | {"dflash_config": config["dflash_config"] | {"attention_mode": wrong}})
        with pytest.raises(LayoutError, match=said):
            Draft.load(tmp_path / "draft")


def test_names_that_sglang_reads_first_say_the_same(tmp_path: Path) -> None:
    draft = simple_draft("dspark")
    draft.save(tmp_path / "draft")
    config = config_of(tmp_path / "draft")
    assert draft.config.block is not None
    same = {"dspark_block_size": draft.config.block.size, "dspark_noise_token_id": draft.config.block.mask_token_id}
    rewrite(tmp_path / "draft", config | same)
    assert Draft.load(tmp_path / "draft", strict=True).config.meaning() == draft.config.meaning()
    for name, value in {"block_size": 3, "noise_token_id": 5, "target_layer_ids": [0], "markov_rank": 9}.items():
        rewrite(tmp_path / "draft", config | {f"dspark_{name}": value})
        with pytest.raises(LayoutError, match=f"dspark_{name} is"):
            Draft.load(tmp_path / "draft")
