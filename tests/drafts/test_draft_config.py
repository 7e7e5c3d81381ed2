"""Every configuration fault is refused with the field, the value found and what is allowed."""

from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.drafts.checks import DraftConfigError
from draftsmith.drafts.config import DraftConfig, check_against_target
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.rope_config import RopeConfig
from draftsmith.drafts.shapes import BlockShape
from draftsmith.errors import DraftsmithError

FULL, SLIDING = "full_attention", "sliding_attention"


def fields(**changes: Any) -> dict[str, Any]:
    """A configuration that is right, with some fields changed; ... removes one."""
    right: dict[str, Any] = {
        "architecture": "dflash",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 97,
        "max_position_embeddings": 128,
        "rope": {"rope_theta": 10000.0},
        "layer_types": [FULL, FULL],
        "block_size": 7,
        "mask_token_id": 96,
        "target_layer_ids": [0, 3],
        "num_target_layers": 4,
    }
    return {name: value for name, value in {**right, **changes}.items() if value is not ...}


COUNTS = ("num_hidden_layers", "num_target_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    *[({name: bad}, [name, repr(bad), ">= 1"]) for name in (*COUNTS, *SIZES) for bad in (0, -3, True, 2.0, "4", None)],
    *[({"block_size": bad}, ["block_size", repr(bad), ">= 2"]) for bad in (1, 0, True, 7.5, None)],
    *[({"mask_token_id": bad}, ["mask_token_id", repr(bad), ">= 0"]) for bad in (None, True, -1, "96", 3.0)],
    ({"mask_token_id": ...}, ["mask_token_id is missing"]),
    ({"mask_token_id": 97}, ["mask_token_id is 97", "below vocab_size", "97"]),
    *[({"target_layer_ids": bad}, ["target_layer_ids", repr(bad), "a list"]) for bad in (3, "0,3", None, {"a": 1})],
    ({"target_layer_ids": []}, ["target_layer_ids is empty", "one or more"]),
    ({"target_layer_ids": [1, 2, 1]}, ["target_layer_ids", "repeats [1]", "distinct"]),
    ({"target_layer_ids": [1, True]}, ["target_layer_ids", "True", "integers"]),
    ({"target_layer_ids": [1, 2.0]}, ["target_layer_ids", "2.0", "integers"]),
    ({"target_layer_ids": [0, 4]}, ["target_layer_ids", "[4]", "0 to 3", "has 4"]),
    ({"target_layer_ids": [-1]}, ["target_layer_ids", "[-1]", "0 to 3"]),
    ({"architecture": "dflsh"}, ["architecture is 'dflsh'", "'dflash'", "did you mean 'dflash'"]),
    ({"architecture": None}, ["architecture is None", "'dflash'"]),
    ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]),
    ({"dtype": "int8"}, ["dtype is 'int8'", "'bfloat16'", "'float32'"]),
    ({"layer_types": [FULL]}, ["layer_types has 1 entries", "2 layers"]),
    ({"layer_types": [FULL, "linear"]}, ["layer_types holds 'linear'", FULL, SLIDING]),
    ({"layer_types": FULL}, ["layer_types", "a list"]),
    ({"layer_types": [FULL, SLIDING]}, ["sliding_window is None", SLIDING, ">= 1"]),
    ({"sliding_window": 0}, ["sliding_window is 0", ">= 1"]),
    ({"num_attention_heads": 3}, ["num_attention_heads is 3", "multiple of num_key_value_heads", "2"]),
    ({"head_dim": 7}, ["head_dim 7", "even"]),
    ({"causal": 1}, ["causal is 1", "true or false"]),
    ({"attention_sinks": "yes"}, ["attention_sinks is 'yes'", "true or false"]),
    *[
        ({name: bad}, [name, repr(bad), "finite"])
        for name in ("rms_norm_eps", "output_multiplier", "initializer_range")
        for bad in (0, -1.0, float("nan"), float("inf"), "1e-6", True)
    ],
    ({"final_logit_softcapping": 0}, ["final_logit_softcapping is 0", "> 0"]),
    ({"input_embedding_scale": -2.0}, ["input_embedding_scale is -2.0", "> 0"]),
    ({"head": {"emb_dim": 3}}, ["emb_dim", "has no head"]),
    ({"head": [1]}, ["head is [1]", "dictionary"]),
    ({"block_sizes": 7}, ["unknown field 'block_sizes'", "did you mean 'block_size'"]),
    ({"rope": ...}, ["rope is missing"]),
    ({"rope": {}}, ["rope_theta is missing"]),
    ({"rope": {"rope_theta": -5.0}}, ["rope_theta is -5.0", "> 0"]),
    ({"rope": {"rope_theta": 1e4, "rope_type": "longrope"}}, ["rope_type is 'longrope'", "'yarn'"]),
    ({"rope": {"rope_theta": 1e4, "rope_type": "yarn"}}, ["'yarn' needs factor"]),
    ({"rope": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 0.5}}, ["factor is 0.5", ">= 1.0"]),
    ({"rope": {"rope_theta": 1e4, "factor": 2.0}}, ["'default' does not use factor = 2.0"]),
    ({"rope": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, ["does not use beta_fast"]),
    ({"rope": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 2.0}}, ["'llama3' needs", "low_freq_factor"]),
    ({"rope": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, ["partial_rotary_factor is 1.5", "(0, 1]"]),
    ({"rope": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, ["rotates 0 channels", "even"]),
    ({"rope": {"rope_theta": 1e4, "theta": 3.0}}, ["unknown field 'theta'"]),
]


@pytest.mark.parametrize(("change", "said"), FAULTS, ids=[str(change) for change, _ in FAULTS])
def test_a_fault_is_named_with_value_and_what_is_allowed(change: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(DraftConfigError) as raised:
        DraftConfig(**fields(**change))
    for part in said:
        assert part in str(raised.value)


@pytest.mark.parametrize("build", [DraftConfig.parse, DraftConfig.model_validate, Draft.from_config])
def test_every_way_of_building_raises_the_same(build: Any) -> None:
    with pytest.raises(DraftsmithError, match="block_size is 1"):
        build(fields(block_size=1))


def test_several_faults_are_said_together() -> None:
    with pytest.raises(DraftConfigError) as raised:
        DraftConfig(**fields(block_size=1, mask_token_id=-1, vocab=3))
    assert len(str(raised.value).splitlines()) == 3


def test_what_is_right_is_taken_and_comes_back() -> None:
    yarn = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}
    config = DraftConfig(
        **fields(layer_types=(SLIDING, FULL), sliding_window=5, causal=False, rope=yarn, final_logit_softcapping=30)
    )
    assert DraftConfig.parse(config.to_dict()) == config
    assert DraftConfig.parse(config) is config
    assert config.rope.theta == 1e6
    assert config.rope.type == "yarn"
    assert config.rope.as_parameters() == {**yarn, "factor": 4.0, "partial_rotary_factor": 1.0}
    assert DraftConfig(**fields(rope=RopeConfig(rope_theta=5.0))).rope.theta == 5.0


def test_a_changed_copy_is_checked_again() -> None:
    config = DraftConfig(**fields())
    assert config.replace(block_size=3).block == BlockShape(size=3, mask_token_id=96)
    assert config.replace(block_size=3).replace(block_size=7) == config
    with pytest.raises(DraftConfigError, match="block_size is 0"):
        config.replace(block_size=0)


TARGET = SimpleNamespace(hidden_size=32, vocab_size=97, num_layers=4)


def test_a_draft_that_fits_its_target_passes() -> None:
    check_against_target(DraftConfig(**fields()), TARGET)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"hidden_size": 64}, ["hidden_size is 32 in the draft and 64 in the target"]),
        ({"vocab_size": 128}, ["vocab_size is 97 in the draft and 128 in the target"]),
        ({"num_layers": 6}, ["num_target_layers is 4 in the draft and 6 in the target"]),
        ({"num_layers": 3}, ["num_target_layers is 4 in the draft and 3 in the target"]),
        ({"hidden_size": 64, "vocab_size": 128}, ["hidden_size", "vocab_size"]),
    ],
)
def test_a_draft_that_does_not_fit_its_target_is_refused(facts: dict[str, int], said: list[str]) -> None:
    target = SimpleNamespace(**{**vars(TARGET), **facts})
    with pytest.raises(DraftConfigError) as raised:
        check_against_target(DraftConfig(**fields()), target)
    for part in said:
        assert part in str(raised.value)
