"""Recipes: what is read, what is refused and how it is said, and that the shipped ones mean what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from draftsmith.algorithms.build import draft_config
from draftsmith.errors import DraftsmithError
from draftsmith.run.recipe import Recipe, find_recipe, load_recipe, parse_recipe, save_recipe, shipped_recipes
from draftsmith.targets.info import TargetInfo

MINIMAL = {
    "run": "runs/x",
    "target": {"path": "models/target"},
    "draft": {"algorithm": "dflash", "block_size": 8, "num_hidden_layers": 2, "mask_token_id": 5},
}


def write(path: Path, fields: Any) -> Path:
    path.write_text(json.dumps(fields))  # JSON is YAML
    return path


@pytest.fixture
def recipe_file(tmp_path):
    return write(tmp_path / "recipe.yaml", MINIMAL)


def refusal(fields: Any) -> str:
    with pytest.raises(DraftsmithError) as error:
        parse_recipe(fields)
    return str(error.value)


def with_value(section: str, key: str, value: Any) -> dict[str, Any]:
    return {**MINIMAL, section: {**MINIMAL.get(section, {}), key: value}}


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_minimal_recipe_has_a_place_for_everything(recipe_file):
    recipe = load_recipe(recipe_file)
    assert recipe.answers == Path("runs/x/answers.jsonl")
    places = [recipe.answers, recipe.features, recipe.training, recipe.draft_directory]
    places += [recipe.bench_json, recipe.bench_page]
    assert len(set(places)) == len(places)
    assert all(place.parent == recipe.run for place in places)


def test_overrides_replace_single_values_and_keep_the_rest(recipe_file):
    recipe = load_recipe(
        recipe_file,
        [
            "train.lr=2e-4",
            "draft.target_layer_ids=[1,3]",
            "run=runs/y",
            "draft.objective.weighting={kind: decay, gamma: 3}",
        ],
    )
    assert recipe.train.lr == 2e-4
    assert recipe.draft.target_layer_ids == (1, 3)
    assert recipe.run == Path("runs/y")
    assert recipe.draft.objective.weighting.gamma == 3
    assert recipe.draft.block_size == 8


def test_values_may_refer_to_others(tmp_path):
    fields = {**MINIMAL, "run": "runs/${draft.algorithm}-${draft.block_size}"}
    assert load_recipe(write(tmp_path / "r.yaml", fields)).run == Path("runs/dflash-8")


def test_the_schema_describes_every_section():
    schema = Recipe.model_json_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False


# --- refusing -------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named_and_the_shipped_ones_are_offered():
    with pytest.raises(DraftsmithError, match=r"nowhere\.yaml.*smollm2-dflash"):
        load_recipe("nowhere.yaml")


@pytest.mark.parametrize("text", ["a: [1, 2", "key: value: more", "\t- x"])
def test_broken_yaml_is_said_to_be_that(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(DraftsmithError, match="not valid YAML"):
        load_recipe(path)


@pytest.mark.parametrize("text", ["5", "run: ${oc.env:X"])
def test_a_single_value_and_a_malformed_reference_are_refused(tmp_path, text):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(DraftsmithError, match=r"recipe .*odd\.yaml cannot be read as sections"):
        load_recipe(path)


def test_a_list_or_nothing_is_no_recipe(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n- 2\n")
    with pytest.raises(DraftsmithError, match="must hold the sections"):
        load_recipe(path)
    path.write_text("")
    with pytest.raises(DraftsmithError, match="run is missing"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (with_value("train", "warmup_ration", 0.1), "unknown key `warmup_ration` in section `train`; did you mean"),
        (with_value("train", "warmup_ration", 0.1), "`warmup_ratio`"),
        (with_value("draft", "blocksize", 8), "unknown key `blocksize` in section `draft`; did you mean `block_size`"),
        (with_value("target", "mask_token_id", 8), "`mask_token_id` in section `target`; it belongs under `draft`"),
        (
            with_value("target", "zzz", 8),
            "unknown key `zzz` in section `target`; valid keys: device, dtype, fuse, path",
        ),
        ({**MINIMAL, "trian": {}}, "unknown key `trian` at the top of the recipe; did you mean `train`"),
        (
            with_value("draft", "objective", {"weighting": {"kind": "decay", "gama": 2}}),
            "unknown key `gama` in section `draft.objective.weighting`; did you mean `gamma`",
        ),
        (
            with_value("draft", "markov_rank", 8),
            "unknown key `markov_rank` in section `draft`; only another kind of `draft` has it; valid keys: algorithm,",
        ),
    ],
)
def test_unknown_keys_name_section_and_nearest_key(fields, said):
    assert said in refusal(fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (with_value("train", "lr", "fast"), "train.lr is 'fast': input should be a valid number"),
        (with_value("train", "epochs", 1.5), "train.epochs is 1.5"),
        (with_value("train", "precision", "fp8"), "train.precision is 'fp8': input should be 'auto', 'fp32' or 'bf16'"),
        (with_value("bench", "max_new_tokens", 0), "bench.max_new_tokens is 0: input should be greater than or equal"),
        (with_value("export", "which", "first"), "export.which is 'first': input should be 'best' or 'last'"),
        ({**MINIMAL, "train": 3}, "train is 3"),
        ({**MINIMAL, "run": " "}, "run is ' ': a run needs a directory to work in"),
        ({key: MINIMAL[key] for key in ("run", "draft")}, "target is missing"),
        ({**MINIMAL, "target": {}}, "target.path is missing"),
        (with_value("draft", "objective", {"weighting": {"kind": "decoy"}}), "draft.objective.weighting"),
        (with_value("bench", "temperature", -1), "bench.temperature is -1: it needs a number >= 0 (0 is greedy)"),
        (with_value("regenerate", "top_k", 0.5), "regenerate.top_k is 0.5: it needs an integer from 0 (off)"),
        (with_value("bench", "engine", {"slots": 2}), "`bench.engine` is now the section `engine` at the top"),
        (
            with_value("engine", "proposer", {"threshold": 0.5}),
            "engine.proposer: dflash has no decoding options of its own; remove threshold=0.5",
        ),
        (
            with_value("engine", "proposer", {"num_proposals": 2}),
            "engine.proposer: num_proposals",
        ),
    ],
)
def test_wrong_values_name_field_value_and_what_is_allowed(fields, said):
    assert said in refusal(fields)


@pytest.mark.parametrize(
    ("algorithm", "options", "said"),
    [
        ("domino", {"token_table": True}, None),
        (
            "domino",
            {"token_tabel": True},
            "unknown field 'token_tabel' in the decoding options of domino",
        ),
        ("domino", {"rollout": "fast"}, "rollout is 'fast'; input should be 'auto', 'plain', 'dense' or 'pruned'"),
        ("dspark", {"min_survival": 0.5}, None),
        ("dspark", {"min_survival": 2}, "min_survival is 2"),
        ("dspark", {"token_table": True}, "allowed: rollout, tensor_parallel, min_survival"),
        ("dta", {"rollout": "plain"}, "dta has no decoding options of its own; remove rollout='plain'"),
    ],
)
def test_options_of_the_draft_s_method_are_checked_before_anything_is_loaded(algorithm, options, said):
    fields = with_value("draft", "algorithm", algorithm) | {"engine": {"proposer": options}}
    if said is None:
        assert parse_recipe(fields).engine.proposer == options
    else:
        assert said in refusal(fields)


def test_an_unknown_algorithm_names_the_known_ones():
    message = refusal(with_value("draft", "algorithm", "dflush"))
    assert "'dflush'" in message
    assert "'dflash'" in message
    assert "draft" in message


def test_every_fault_is_listed_at_once():
    fields = {**MINIMAL, "train": {"lr": "fast", "epoch": 3}, "bench": {"top_p": 2}}
    message = refusal(fields)
    assert all(name in message for name in ("train.lr", "`epoch`", "bench.top_p"))


@pytest.mark.parametrize("override", ["train.lr", "=3", "train.lr=[1", "run.deeper.still=1"])
def test_overrides_that_make_no_sense_are_refused(recipe_file, override):
    with pytest.raises(DraftsmithError):
        load_recipe(recipe_file, [override])


def test_an_unknown_reference_is_refused(tmp_path):
    path = write(tmp_path / "r.yaml", {**MINIMAL, "run": "runs/${nothing.here}"})
    with pytest.raises(DraftsmithError, match="nothing"):
        load_recipe(path)


def test_a_saved_recipe_is_the_same_recipe(tmp_path):
    for name in ("smollm2-dta", "qwen3-8b-domino", "qwen3-8b-dflash-finetune"):
        recipe = load_recipe(name, ["target.path=elsewhere", "draft.init_from=y", "target.fuse=off"])
        save_recipe(recipe, tmp_path / "saved.yaml")
        assert load_recipe(tmp_path / "saved.yaml") == recipe


# --- the shipped recipes --------------------------------------------------------------------------------------------


def test_recipes_are_found_by_name_and_all_load():
    assert {"smollm2-dflash", "qwen3-4b-dflash", "qwen3-8b-dflash"} <= set(shipped_recipes())
    for name in shipped_recipes():
        load_recipe(name, ["target.path=elsewhere"])  # some name an installed package's file
    assert load_recipe("smollm2-dflash", ["target.path=elsewhere"]).target.path == "elsewhere"
    assert find_recipe("qwen3-8b-dflash").name == "qwen3-8b-dflash.yaml"


@pytest.mark.parametrize("base", ["smollm2-dflash", "qwen3-8b-dflash"])
def test_finetuning_recipes_say_where_to_start_and_leave_the_shape_to_the_checkpoint(base):
    recipe = load_recipe(f"{base}-finetune", ["target.path=elsewhere"])
    assert recipe.draft.init_from == str(load_recipe(base, ["target.path=elsewhere"]).draft_directory)
    assert recipe.draft.model_fields_set == {"algorithm", "init_from", "objective"}
    assert recipe.train.lr == 1e-4


@pytest.mark.parametrize(
    ("name", "hidden_size", "intermediate_size"), [("qwen3-8b-dflash", 4096, 12288), ("qwen3-4b-dflash", 2560, 9728)]
)
def test_the_qwen3_recipes_hold_the_published_hyper_parameters(name, hidden_size, intermediate_size):
    recipe = load_recipe(name)
    # Nothing of the draft's shape may come from this configuration but the sizes that are the target's by definition.
    silent = Qwen3Config(
        hidden_size=hidden_size,
        num_hidden_layers=36,
        vocab_size=151936,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        intermediate_size=1,
        max_position_embeddings=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1.0},
    )
    config = draft_config(recipe.draft, TargetInfo(silent))
    assert (config.num_hidden_layers, config.block.size, config.block.mask_token_id) == (5, 16, 151669)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert (config.hidden_size, config.intermediate_size) == (hidden_size, intermediate_size)
    assert config.rope.theta == 1_000_000
    assert config.max_position_embeddings == 40960
    assert config.layer_types == ("full_attention",) * 5
    assert config.rms_norm_eps == 1e-6
    train, weighting = recipe.train, recipe.draft.objective.weighting
    assert (weighting.kind, weighting.gamma) == ("decay", 7.0)
    assert (train.num_anchors, train.epochs, train.lr, train.warmup_ratio, train.clip) == (512, 6, 6e-4, 0.04, 1.0)
    assert recipe.data.max_length == 3072
    assert train.tokens_per_row >= recipe.data.max_length


@pytest.mark.parametrize(("written", "meant"), [("off", "off"), ("on", "on"), ("auto", "auto")])
def test_switches_are_what_they_read_as(written, meant):
    """YAML takes an unquoted on or off for a truth value."""
    recipe = load_recipe("smollm2-dflash", ["target.path=models/target", f"target.fuse={written}"])
    assert recipe.target.fuse == meant
