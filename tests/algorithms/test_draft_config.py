from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import CONFIG_MAPPING

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.dflash import DFlashSection
from draftsmith.algorithms.dta import DTASection
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.shapes import BlockShape
from draftsmith.errors import DraftsmithError
from draftsmith.targets.info import TargetInfo
from tests.algorithms.facts import gemma, llama, qwen3_8b
from tests.support.decoders import decoder_config

PUBLISHED: dict[str, Any] = {"mask_token_id": 151669, "block_size": 16, "num_hidden_layers": 5}
SMALL: dict[str, Any] = {"mask_token_id": 98, "block_size": 7, "num_hidden_layers": 2}


def test_the_published_draft_of_qwen3_8b() -> None:
    config = draft_config(DFlashSection(**PUBLISHED), qwen3_8b())
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (4096, 12288, 151936)
    assert (config.num_target_layers, config.max_position_embeddings) == (36, 40960)
    assert config.rope.theta == 1_000_000.0
    assert config.layer_types == ("full_attention",) * 5
    assert (config.architecture, config.head.model_dump(), config.dtype) == ("dflash", {}, "bfloat16")


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_no_default_can_know_is_asked_for(name: str) -> None:
    fields = {key: value for key, value in PUBLISHED.items() if key != name}
    with pytest.raises(DraftsmithError, match=f"draft.{name} is missing"):
        draft_config(DFlashSection(**fields), qwen3_8b())


def test_the_mask_token_never_comes_from_the_target() -> None:
    facts = qwen3_8b()
    facts.text_config.pad_token_id = facts.text_config.eos_token_id = 151643
    with pytest.raises(DraftsmithError, match="mask_token_id is missing"):
        draft_config(DFlashSection(block_size=16, num_hidden_layers=5), facts)


def test_the_target_s_rope_is_copied_whole() -> None:
    rope = draft_config(DFlashSection(**SMALL), llama()).rope
    assert (rope.type, rope.theta, rope.factor, rope.original_max_position_embeddings) == ("llama3", 5e5, 8.0, 64)
    rope = draft_config(DFlashSection(**SMALL), gemma()).rope
    assert (rope.type, rope.theta, rope.factor) == ("linear", 1e6, 8.0)
    rope = draft_config(DFlashSection(**SMALL, rope_theta=777.0), llama()).rope
    assert (rope.type, rope.theta, rope.factor) == ("default", 777.0, None)


def test_a_head_size_that_the_target_leaves_out_is_its_hidden_size_over_its_heads() -> None:
    facts = llama()
    facts.text_config.head_dim = None
    assert draft_config(DFlashSection(**SMALL), facts).head_dim == 8


def _info(kind: str) -> TargetInfo:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {kind}")
    return TargetInfo(decoder_config(kind))


def test_layers_of_several_sizes_give_those_of_most() -> None:
    """Three of four layers of this Gemma 4 slide, and have heads of 16; the others' are wider."""
    config = draft_config(DFlashSection(**SMALL, num_taps=1, rope_theta=1e6), _info("gemma4_text"))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "solar_open"])
def test_a_mixture_of_experts_without_a_dense_width_gives_three_times_its_hidden_size(kind: str) -> None:
    assert draft_config(DFlashSection(**SMALL, num_taps=1), _info(kind)).intermediate_size == 3 * 64
    assert draft_config(DFlashSection(**SMALL, num_taps=1, intermediate_size=44), _info(kind)).intermediate_size == 44


@pytest.mark.parametrize("kind", ["jamba", "kimi_linear", "nemotron_h"])
def test_a_target_without_positions_gives_a_plain_rope(kind: str) -> None:
    rope = draft_config(DFlashSection(**SMALL, num_taps=1), _info(kind)).rope
    assert (rope.type, rope.theta) == ("default", 10_000.0)


def test_the_section_overrides_every_default() -> None:
    given: dict[str, Any] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "intermediate_size": 44,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 77,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 9,
        "causal": False,
        "dtype": "float32",
        "target_layer_ids": (4, 0, 2),
    }
    config = draft_config(DTASection(**SMALL, **given), llama())
    for name, value in (SMALL | given).items():
        assert config.flat()[name] == value
    assert config.architecture == "dflash"


def test_taps_are_named_or_counted() -> None:
    assert draft_config(DFlashSection(**SMALL, num_taps=3), llama()).target_layer_ids == (1, 2, 3)
    assert draft_config(DFlashSection(**SMALL, num_taps=1), llama()).target_layer_ids == (3,)
    with pytest.raises(DraftsmithError, match=r"num_taps is 3 and draft.target_layer_ids names 2"):
        draft_config(DFlashSection(**SMALL, num_taps=3, target_layer_ids=(0, 1)), llama())
    with pytest.raises(DraftsmithError, match=r"target_layer_ids is .*\[6\] are not layers of the target"):
        draft_config(DFlashSection(**SMALL, target_layer_ids=(0, 6)), llama())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_token_id": 99}, "mask_token_id is 99"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        ({"layer_types": ("sliding_attention",) * 2}, "sliding_window"),
        ({"num_key_value_heads": 4}, "num_attention_heads"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        draft_config(DFlashSection(**(SMALL | fields)), llama())


@pytest.mark.parametrize("name", ["block_size", "num_hidden_layers", "head_dim"])
def test_a_size_out_of_range_is_refused_by_the_section_and_by_the_configuration(name: str) -> None:
    with pytest.raises(ValidationError, match=rf"{name}\s+Input should be greater than or equal to"):
        DFlashSection(**(SMALL | {name: 0}))
    with pytest.raises(DraftsmithError, match=f"{name} is 0; allowed: an integer >= "):
        draft_config(DFlashSection(**SMALL), llama()).replace(**{name: 0})


def checkpoint() -> DraftConfig:
    return draft_config(
        DFlashSection(**SMALL, head_dim=6, intermediate_size=44, target_layer_ids=(3, 1), rope_theta=321.0), llama()
    )


def test_what_the_section_leaves_out_comes_from_the_checkpoint() -> None:
    assert draft_config(DFlashSection(init_from="somewhere"), llama(), checkpoint()) == checkpoint()
    changed = draft_config(
        DTASection(init_from="somewhere", mask_token_id=5, block_size=4, num_taps=2), llama(), checkpoint()
    )
    assert (changed.block, changed.target_layer_ids) == (BlockShape(size=4, mask_token_id=5), (1, 3))
    assert (changed.head_dim, changed.intermediate_size, changed.rope.theta) == (6, 44, 321.0)
    with pytest.raises(DraftsmithError, match="no checkpoint configuration was read"):
        draft_config(DFlashSection(init_from="somewhere", **SMALL), llama())


def test_the_target_says_the_sizes_that_must_agree_with_it() -> None:
    other: TargetInfo = qwen3_8b()
    config = draft_config(DFlashSection(init_from="somewhere"), other, checkpoint())
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (4096, 151936, 36)


def test_a_target_that_scales_its_embeddings_gives_the_draft_its_scale():
    section = DFlashSection(mask_token_id=5, block_size=4, num_hidden_layers=2)
    scaled = replace(gemma(), embedding_scale=48**0.5)
    assert draft_config(section, scaled).input_embedding_scale == 48**0.5
    assert draft_config(section, gemma()).input_embedding_scale == 1.0


def test_a_window_that_no_layer_uses_is_an_error():
    with pytest.raises(DraftsmithError, match=r"draft\.sliding_window is 8, but no layer slides"):
        draft_config(DFlashSection(**SMALL, sliding_window=8), llama())


def test_scales_and_caps_that_a_recipe_names():
    section = DFlashSection(
        mask_token_id=5,
        block_size=4,
        num_hidden_layers=2,
        output_multiplier=0.5,
        final_logit_softcapping=20.0,
        input_embedding_scale=3.0,
    )
    config = draft_config(section, llama())
    assert (config.output_multiplier, config.final_logit_softcapping, config.input_embedding_scale) == (0.5, 20.0, 3.0)
