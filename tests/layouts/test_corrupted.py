"""Damaged directories: one clear error for each, in every layout, and never a partial load."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.layouts import LayoutError
from tests.layouts.drafts import simple_draft, target_ends

WEIGHTS = "model.safetensors"

CASES = [
    ("zlab", "dflash"),
    ("zlab", "dflash2"),
    ("sglang", "domino"),
    ("modelopt", "dspark"),
    ("speculators", "dspark"),
    ("speculators", "dflash2"),
]


@pytest.fixture(params=CASES, ids="-".join)
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    layout, architecture = request.param
    simple_draft(architecture).save(tmp_path / "draft", layout, target=target_ends())
    return tmp_path / "draft"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_weights(saved: Path, share: float) -> None:
    content = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(content[: int(share * len(content))])
    with pytest.raises(LayoutError, match=r"model\.safetensors is damaged"):
        Draft.load(saved)


def test_a_header_that_lies_about_its_length(saved: Path) -> None:
    content = (saved / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    for wrong in (0, length - 3, length + 7, 2**63):
        (saved / WEIGHTS).write_bytes(wrong.to_bytes(8, "little") + content[8:])
        with pytest.raises(LayoutError, match="is damaged"):
            Draft.load(saved)


def test_every_tensor_is_missed_and_every_stranger_noticed(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    own = {name: t for name, t in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    for name in random.Random(0).sample(sorted(own), 8):
        save_file({n: t for n, t in tensors.items() if n != name}, saved / WEIGHTS)
        with pytest.raises(DraftsmithError):
            Draft.load(saved)
    save_file(tensors | {"layers.9.mlp.up_proj.weight": torch.ones(2)}, saved / WEIGHTS)
    with pytest.raises(DraftsmithError, match=r"not used: layers\.9\.mlp\.up_proj\.weight \[2\]"):
        Draft.load(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(saved: Path, value: float) -> None:
    tensors = load_file(saved / WEIGHTS)
    for name in ("fc.weight", "layers.0.self_attn.k_norm.weight"):
        bad = tensors[name].clone()
        bad.view(-1)[-1] = value
        save_file(tensors | {name: bad}, saved / WEIGHTS)
        with pytest.raises(DraftsmithError, match=f"not finite: {name} holds NaN or Inf"):
            Draft.load(saved)


def test_config_files_that_are_not(saved: Path) -> None:
    path = saved / "config.json"
    good = path.read_text()
    for content in ("", "{", "[]", "null", good[: len(good) // 2], "[" * 100_000, '{"a": }', "\x00"):
        path.write_text(content)
        with pytest.raises(LayoutError, match=r"config\.json (is not valid JSON|holds a JSON)"):
            Draft.load(saved)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(LayoutError, match="is not valid JSON"):
        Draft.load(saved)
    path.unlink()
    path.mkdir()
    with pytest.raises(LayoutError, match=r"config\.json is a directory"):
        Draft.load(saved)


REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
    "num_target_layers",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "gru_hidden_dim",
    "emb_dim",
    "markov_rank",
)
WRONG: tuple[Any, ...] = (-1, 0, 2.5, True, "8", [], {}, [1, "a"], 10**30, [[0]], float("nan"))


def mutate(config: dict[str, Any], names: tuple[str, ...], chance: random.Random) -> str | None:
    """Replaces one of the fields `names`, wherever it stands, by something it cannot be; says which."""
    places = [config, *(part for part in config.values() if isinstance(part, dict))]
    there = sorted(name for name in names if any(name in part for part in places))
    name = chance.choice(there)
    value = chance.choice(WRONG)
    was = next(part[name] for part in places if name in part)
    if value == was or (name, value) == ("mask_token_id", 0):
        return None  # unusual, but it may be
    for part in places:
        if name in part:
            part[name] = value
    return name


def test_forty_mutated_configurations(saved: Path) -> None:
    """Each is refused, and the message names the field, or the tensors that no longer fit it."""
    chance = random.Random(5)
    good = (saved / "config.json").read_text()
    done: list[str] = []
    while len(done) < 40:
        config = json.loads(good)
        name = mutate(config, REQUIRED, chance)
        if name is None:
            continue
        (saved / "config.json").write_text(json.dumps(config))
        with pytest.raises(DraftsmithError) as raised:
            Draft.load(saved)
        spelt = {"aux_hidden_state_layer_ids": "layer"}.get(name, name)
        assert spelt in str(raised.value) or "wrong shape" in str(raised.value), (name, str(raised.value))
        assert len(str(raised.value)) < 20_000
        done.append(name)
    assert len(set(done)) > 8


@pytest.mark.parametrize("value", ["x", 3, True, [], {}])
def test_fields_of_other_kinds_than_numbers(saved: Path, value: Any) -> None:
    good = json.loads((saved / "config.json").read_text())
    for name in (
        "layer_types",
        "rope_parameters",
        "dtype",
        "sliding_window_non_causal",
        "projector_type",
        "hidden_act",
    ):
        for part in (good, *(p for p in good.values() if isinstance(p, dict))):
            if name not in part:
                continue
            was = part[name]
            part[name] = value
            (saved / "config.json").write_text(json.dumps(good))
            if value != was and not (value in ({}, []) and name == "rope_parameters"):
                with pytest.raises(DraftsmithError):
                    Draft.load(saved)
            part[name] = was
