"""Every rule of a warm start, with the text that the user reads."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from draftsmith.algorithms.build import copied_fields, draft_config
from draftsmith.algorithms.registry import algorithm
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.info import TargetInfo
from draftsmith.training.warm_start import read_warm_start
from tests.support.tiny_draft import tiny_draft

TARGET = SimpleNamespace(hidden_size=24, num_layers=6, vocab_size=41)
HEADS: dict[str, dict[str, Any]] = {
    "domino": {"gru_hidden_dim": 5, "emb_dim": 7, "pure_draft_prefix_len": 1, "shift_label": True},
    "dspark": {"markov_rank": 6, "markov_head_type": "gated"},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 4},
}
FRESH = {
    "domino": "embed_proj.0, embed_proj.2, prefix_gru",
    "dspark": "confidence_head.proj, markov_head.gate_proj, markov_head.markov_w1, markov_head.markov_w2",
    "dflash2": "candidate_selector, candidate_selector.hidden_projection, layers.0.attention_conv, "
    "layers.0.attention_conv.kernel_projection, layers.0.mlp_conv, layers.0.mlp_conv.kernel_projection",
}


def facts(**overrides: Any) -> TargetInfo:
    """A target of the drafts' sizes whose other sizes no draft here has."""
    fields = {
        "hidden_size": TARGET.hidden_size,
        "num_hidden_layers": TARGET.num_layers,
        "vocab_size": TARGET.vocab_size,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "intermediate_size": 11,
        "rms_norm_eps": 0.5,
        "max_position_embeddings": 33,
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    }
    return TargetInfo(LlamaConfig(**(fields | overrides)))


def section(directory: Path, method: str = "dflash", **fields: Any) -> Any:
    return algorithm(method).section(init_from=str(directory), **fields)


def saved(directory: Path, **overrides: Any) -> Path:
    tiny_draft(TARGET, **({"num_layers": 1, "block_size": 16} | overrides)).save(directory)
    return directory


def configured(directory: Path, method: str = "dflash", target: TargetInfo | None = None, **fields: Any) -> DraftConfig:
    return draft_config(section(directory, method, **fields), target or facts(), read_warm_start(str(directory)).config)


def refusal(directory: Path, config: DraftConfig) -> str:
    """The error's text; checking beforehand and loading say the same, and nothing is loaded."""
    warm = read_warm_start(str(directory))
    with pytest.raises(DraftsmithError) as error:
        warm.check(config)
    draft = Draft.from_config(config)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with pytest.raises(DraftsmithError) as again:
        warm.load_into(draft)
    assert str(again.value) == str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.state_dict().items())
    return str(error.value)


def warnings(directory: Path, config: DraftConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        read_warm_start(str(directory)).load_into(Draft.from_config(config))
    return [record.getMessage() for record in caplog.records]


def opening(directory: Path) -> str:
    return (
        f"draft.init_from {directory} does not fit the configured draft; change the recipe's sizes, or leave them out "
        "to take the checkpoint's:"
    )


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_every_mismatch_is_in_one_error(tmp_path: Path) -> None:
    directory = saved(tmp_path / "draft")
    config = configured(directory, num_hidden_layers=2, intermediate_size=40, num_taps=1)
    assert refusal(directory, config).splitlines() == [
        opening(directory),
        "  fc.weight: found [24, 48], wanted [24, 24]",
        "  layers.0.mlp.down_proj.weight: found [24, 56], wanted [24, 40]",
        "  layers.0.mlp.gate_proj.weight: found [56, 24], wanted [40, 24]",
        "  layers.0.mlp.up_proj.weight: found [56, 24], wanted [40, 24]",
        "  layers.1.input_layernorm.weight: not in the checkpoint, wanted [24]",
        "  layers.1.mlp.down_proj.weight: not in the checkpoint, wanted [24, 40]",
        "  layers.1.mlp.gate_proj.weight: not in the checkpoint, wanted [40, 24]",
        "  layers.1.mlp.up_proj.weight: not in the checkpoint, wanted [40, 24]",
        "  layers.1.post_attention_layernorm.weight: not in the checkpoint, wanted [24]",
        "  layers.1.self_attn.k_norm.weight: not in the checkpoint, wanted [12]",
        "  layers.1.self_attn.k_proj.weight: not in the checkpoint, wanted [24, 24]",
        "  layers.1.self_attn.o_proj.weight: not in the checkpoint, wanted [24, 48]",
        "  layers.1.self_attn.q_norm.weight: not in the checkpoint, wanted [12]",
        "  layers.1.self_attn.q_proj.weight: not in the checkpoint, wanted [48, 24]",
        "  layers.1.self_attn.v_proj.weight: not in the checkpoint, wanted [24, 24]",
    ]


def test_tensors_that_the_draft_does_not_have_are_in_the_error(tmp_path: Path) -> None:
    directory = saved(tmp_path / "draft", num_layers=2)
    lines = refusal(directory, configured(directory, num_hidden_layers=1)).splitlines()
    assert len(lines) == 1 + 11
    assert "  layers.1.mlp.up_proj.weight: found [56, 24], not part of the configured draft" in lines


def test_a_head_that_the_draft_does_not_have_is_in_the_error(tmp_path: Path) -> None:
    directory = saved(tmp_path / "draft", architecture="domino", head=HEADS["domino"])
    assert refusal(directory, configured(directory)).splitlines() == [
        opening(directory),
        "  embed_proj.0.weight: found [7, 29], not part of the configured draft",
        "  embed_proj.2.weight: found [41, 7], not part of the configured draft",
        "  prefix_gru.weight_hh_l0: found [15, 5], not part of the configured draft",
        "  prefix_gru.weight_ih_l0: found [15, 24], not part of the configured draft",
    ]


def test_another_hidden_size_than_the_targets_comes_first(tmp_path: Path) -> None:
    directory = saved(tmp_path / "draft")
    lines = refusal(directory, configured(directory, target=facts(hidden_size=48))).splitlines()
    assert lines[1] == "  hidden_size: found 24, wanted the target's 48"
    assert "  fc.weight: found [24, 48], wanted [48, 96]" in lines


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    directory = saved(tmp_path / "draft")
    tensors = load_file(directory / "model.safetensors")
    tensors["norm.weight"][7] = value
    save_file(tensors, directory / "model.safetensors")
    assert refusal(directory, configured(directory)).splitlines() == [
        opening(directory),
        "  norm.weight: found NaN or Inf, wanted finite numbers",
    ]


@pytest.mark.parametrize(
    ("method", "lost", "shape"),
    [
        ("domino", "embed_proj.2.weight", [41, 7]),
        ("dspark", "markov_head.gate_proj.bias", [6]),
        ("dflash2", "candidate_selector.hidden_projection.weight", [5, 24]),
        ("dflash2", "layers.0.mlp_conv.base_kernel", [2, 2, 24]),
    ],
)
def test_a_head_in_part_is_an_error(tmp_path: Path, method: str, lost: str, shape: list[int]) -> None:
    config = configured(saved(tmp_path / "plain"), method, **HEADS[method])
    directory = tmp_path / "draft"
    Draft.from_config(config).save(directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors[lost]
    save_file(tensors, directory / "model.safetensors")
    assert refusal(directory, config).splitlines() == [
        opening(directory),
        f"  {lost}: not in the checkpoint, which has other parts of this head, wanted {shape}",
    ]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError) as error:
        read_warm_start(str(tmp_path / "nowhere"))
    assert str(error.value) == (
        f"draft.init_from: there is no directory {tmp_path / 'nowhere'}; it takes one with a draft's config.json and "
        "weights"
    )


def test_missing_weights_are_named(tmp_path: Path) -> None:
    directory = saved(tmp_path / "draft")
    (directory / "model.safetensors").unlink()
    with pytest.raises(DraftsmithError) as error:
        read_warm_start(str(directory))
    message = str(error.value)
    assert message.startswith(f"draft.init_from: {directory} holds no weights: neither model.safetensors nor ")
    (directory / "config.json").unlink()
    with pytest.raises(DraftsmithError, match=f"^draft.init_from: {directory / 'config.json'} does not exist"):
        read_warm_start(str(directory))


def test_a_configuration_that_cannot_be_right_is_named_with_its_directory(tmp_path: Path) -> None:
    directory = saved(tmp_path / "draft")
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"mask_token_id": 40', '"mask_token_id": 41'))
    with pytest.raises(DraftsmithError, match=f"^draft.init_from: {directory}: mask_token_id is 41; allowed: an id"):
        read_warm_start(str(directory))


def test_fields_that_nobody_uses_are_errors_in_training_input(tmp_path: Path) -> None:
    directory = saved(tmp_path / "draft")
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"mask_token_id"', '"block_sise": 7, "mask_token_id"'))
    named = "config.json has dflash_config.block_sise = 7"
    with pytest.raises(DraftsmithError, match=f"^draft.init_from: {directory}: {named}"):
        read_warm_start(str(directory))
    Draft.load(directory)  # somebody else's draft, not to be trained on: a warning


# --- what may differ --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"mask_token_id": 17},
            "mask_token_id is 40, this run has 17; masked slots read an embedding that the checkpoint was never "
            "trained on",
        ),
        (
            {"target_layer_ids": (1, 5)},
            "target_layer_ids is [1, 0], this run has [1, 5]; the context projection meets the states of other layers "
            "than it was trained on",
        ),
        (
            {"rope_theta": 123.0},
            "rope is {'rope_theta': 5000.0, 'rope_type': 'default', 'partial_rotary_factor': 1.0}, this run has "
            "{'rope_theta': 123.0, 'rope_type': 'default', 'partial_rotary_factor': 1.0}; keys and queries are rotated "
            "otherwise than the checkpoint was trained with",
        ),
        (
            {"rms_norm_eps": 0.01},
            "rms_norm_eps is 1e-06, this run has 0.01; norms are computed otherwise than the checkpoint was trained "
            "with",
        ),
        (
            {"causal": True},
            "causal is None, this run has True; slots see other slots of their block than they were trained on",
        ),
    ],
)
def test_what_degrades_is_a_warning(
    tmp_path: Path, fields: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = saved(tmp_path / "draft")
    assert warnings(directory, configured(directory, **fields), caplog) == [f"{directory}: {text}"]


def test_a_draft_of_another_target_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = saved(tmp_path / "draft")
    config = configured(directory, target=facts(num_hidden_layers=5, vocab_size=43))
    assert warnings(directory, config, caplog) == [
        f"{directory}: vocab_size is 41, this run has 43; the checkpoint was trained on the tokens of another target",
        f"{directory}: num_target_layers is 6, this run has 5; the checkpoint was trained on the states of another "
        "target",
    ]


@pytest.mark.parametrize("fields", [{"block_size": 7}, {"max_position_embeddings": 1000}, {"dtype": "bfloat16"}, {}])
def test_what_costs_nothing_is_silent(tmp_path: Path, fields: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    directory = saved(tmp_path / "draft")
    config = configured(directory, **fields)
    assert warnings(directory, config, caplog) == []
    assert all(config.flat()[name] == value for name, value in fields.items())


def test_copies_of_the_targets_ends_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = saved(tmp_path / "draft")
    tensors = load_file(directory / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.zeros(41, 24)
    save_file(tensors, directory / "model.safetensors")
    assert warnings(directory, configured(directory), caplog) == [
        f"{directory}: drafts have no embed_tokens.weight; not loaded"
    ]


@pytest.mark.parametrize("method", HEADS)
def test_a_head_that_the_checkpoint_lacks_starts_fresh(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = saved(tmp_path / "draft")
    config = configured(directory, method, **HEADS[method])
    assert warnings(directory, config, caplog) == [f"{directory} lacks {FRESH[method]}; they start with fresh weights"]
    warm = read_warm_start(str(directory))
    draft = Draft.from_config(config, generator=torch.Generator().manual_seed(3))
    fresh = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    warm.load_into(draft)
    loaded = set()
    for name, tensor in draft.state_dict().items():
        canonical = name.split(".", 1)[1]
        if canonical in warm.tensors:
            assert torch.equal(tensor, warm.tensors[canonical]), name
            loaded.add(canonical)
        else:
            assert torch.equal(tensor, fresh[name]), name
    assert loaded == set(warm.tensors)


def test_another_use_of_the_same_head_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = saved(tmp_path / "draft", architecture="domino", head=HEADS["domino"])
    said = warnings(directory, configured(directory, "domino", shift_label=False), caplog)
    assert len(said) == 1
    assert said[0].endswith("; the head is used otherwise than it was trained")
    assert warnings(directory, configured(directory, "domino"), caplog) == []


# --- what the recipe leaves out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dflash", "dta", *HEADS])
def test_everything_left_out_is_the_checkpoints_and_nothing_the_targets(tmp_path: Path, method: str) -> None:
    architecture = algorithm(method).architecture
    head = {**HEADS.get(method, {})}
    if method == "dspark":
        head |= {"enable_confidence_head": True, "confidence_head_with_markov": False}
    directory = saved(
        tmp_path / "draft",
        architecture=architecture,
        head=head,
        num_layers=2,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=9,
        causal=False,
        attention_sinks=True,
        rms_norm_eps=1e-4,
        input_embedding_scale=1.5,
    )
    config = configured(directory, method)
    assert config == Draft.load(directory).config
    copied = copied_fields(section(directory, method), config)
    targets_own = ("architecture", "hidden_size", "vocab_size", "num_target_layers")
    for name, value in config.flat().items():
        if value is not None and name not in (*targets_own, "rope", "head"):
            assert copied[name] == value, name
    assert copied["rope"] == {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 1.0}
    assert {name.removeprefix("head."): value for name, value in copied.items() if name.startswith("head.")} == head


def test_what_the_recipe_says_is_not_copied(tmp_path: Path) -> None:
    directory = saved(tmp_path / "draft")
    said: dict[str, Any] = {"block_size": 7, "mask_token_id": 3, "num_taps": 2, "rope_theta": 9.0, "dtype": "float16"}
    copied = copied_fields(section(directory, **said), read_warm_start(str(directory)).config)
    assert not {*said, "target_layer_ids", "rope"} & set(copied)


def test_sinks_norms_and_sliding_layers_make_the_round_trip(tmp_path: Path) -> None:
    directory = saved(
        tmp_path / "draft",
        num_layers=3,
        layer_types=("full_attention", "sliding_attention", "sliding_attention"),
        sliding_window=5,
        attention_sinks=True,
    )
    draft = Draft.from_config(configured(directory))
    read_warm_start(str(directory)).load_into(draft)
    draft.save(tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert "layers.2.self_attn.attention_sink_bias" in before
    assert "layers.1.self_attn.k_norm.weight" in before
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (directory / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()
