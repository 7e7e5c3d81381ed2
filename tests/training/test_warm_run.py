"""Runs that start from an exported draft: first evaluation, resumption, and what a new head leaves alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.algorithms.registry import algorithm
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance
from draftsmith.features.reader import Store
from draftsmith.targets.target import Target
from draftsmith.training.record import load_run
from draftsmith.training.run import TrainResult, train
from draftsmith.training.source import StoreSource
from tests.training.counting import BASE, QUIET, counting_store, identity_of, options

METHODS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dta": {},
    "domino": {"gru_hidden_dim": 5, "emb_dim": 7, "pure_draft_prefix_len": 1, "shift_label": False},
    "dspark": {"markov_rank": 6},
    "dflash2": {"conv_group_size": 8, "selector_rank": 5, "selector_top_k": 4},
}


@pytest.fixture(scope="module")
def full_store(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Store:
    """With the final states that DSpark learns from."""
    return counting_store(tmp_path_factory.mktemp("full"), target, final_state=True)


def section(method: str, **fields: Any) -> Any:
    return algorithm(method).section(**{**BASE, **METHODS[method], **fields})


def warm_section(method: str, directory: Path, **fields: Any) -> Any:
    """Only what the checkpoint does not have."""
    return algorithm(method).section(init_from=str(directory), **fields)


def run(
    target: Target, store: Store, run_dir: Path, draft_section: Any, *, steps: int = 2, **arguments: Any
) -> TrainResult:
    fields = {"max_steps": steps, **arguments.pop("fields", {})}
    return train(
        section=draft_section,
        target=target,
        source=StoreSource(store),
        run_dir=run_dir,
        options=options(**fields),
        track=QUIET,
        provenance=Provenance(identity_of(target), None),
        **arguments,
    )


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Held-out numbers, in order, without those that say how long things took."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in entry.items() if k not in ("kind", "step")} for entry in lines if entry["kind"] == "eval"]


@pytest.mark.parametrize("method", METHODS)
def test_the_first_evaluation_is_the_exported_drafts_last(
    target: Target, full_store: Store, tmp_path: Path, method: str
) -> None:
    run(target, full_store, tmp_path / "first", section(method, block_size=5))
    draft = load_run(tmp_path / "first", "last")
    draft.save(tmp_path / "draft")
    run(target, full_store, tmp_path / "second", warm_section(method, tmp_path / "draft"), steps=1)
    # Domino's loss weighs its two parts by the run's own progress, which begins anew; all else must agree.
    moving = {"loss", "lambda"} if method == "domino" else set()
    before, after = evaluations(tmp_path / "first"), evaluations(tmp_path / "second")
    kept = [{name: value for name, value in e.items() if name not in moving} for e in (before[-1], after[0], before[0])]
    assert kept[0] == kept[1]
    assert kept[0] != kept[2]
    assert {"accuracy", "accept_length"} <= set(kept[0])
    assert load_run(tmp_path / "second", "last").config == draft.config


@pytest.mark.parametrize("method", ["domino", "dspark", "dflash2"])
def test_a_new_head_on_a_trained_backbone(target: Target, full_store: Store, tmp_path: Path, method: str) -> None:
    """Before the first step the backbone predicts what it did in the plain draft."""
    run(target, full_store, tmp_path / "first", section("dflash"), steps=8)
    load_run(tmp_path / "first", "last").save(tmp_path / "draft")
    plain = evaluations(tmp_path / "first")[-1]["accuracy"]
    head = {"shift_label": False} if method == "domino" else {}
    run(
        target,
        full_store,
        tmp_path / "second",
        warm_section(method, tmp_path / "draft", **METHODS[method] | head),
        steps=1,
    )
    first = evaluations(tmp_path / "second")[0]
    if method == "domino":  # the same slots predict the same tokens
        assert first["base_accuracy"] == plain
    loaded, trained = Draft.load(tmp_path / "draft"), load_run(tmp_path / "second", "last")
    assert trained.config.architecture == method
    assert not torch.equal(loaded.backbone.fc.weight, trained.backbone.fc.weight)  # it goes on learning


def test_blocks_of_seven_from_a_checkpoint_of_sixteen(target: Target, full_store: Store, tmp_path: Path) -> None:
    run(target, full_store, tmp_path / "first", section("dflash", block_size=16))
    load_run(tmp_path / "first", "last").save(tmp_path / "draft")
    run(target, full_store, tmp_path / "second", warm_section("dflash", tmp_path / "draft", block_size=7))
    sixteen, seven = evaluations(tmp_path / "first")[-1], evaluations(tmp_path / "second")[0]
    assert (len(sixteen["accuracy"]), len(seven["accuracy"])) == (15, 6)
    assert load_run(tmp_path / "second", "last").config.block.size == 7


def test_a_resumed_run_does_not_need_the_directory(target: Target, full_store: Store, tmp_path: Path) -> None:
    run(target, full_store, tmp_path / "first", section("dflash"))
    load_run(tmp_path / "first", "last").save(tmp_path / "draft")
    warm = warm_section("dflash", tmp_path / "draft")
    saving = {"save_every": 2, "keep_last": 2}
    run(target, full_store, tmp_path / "straight", warm, steps=4)
    run(target, full_store, tmp_path / "second", warm, steps=4, fields=saving)
    shutil.rmtree(tmp_path / "second" / "checkpoints" / "step-00000004")
    shutil.rmtree(tmp_path / "draft")
    run(target, full_store, tmp_path / "second", warm, steps=4, fields=saving, resume=True)
    resumed, straight = (load_run(tmp_path / name, "last").state_dict() for name in ("second", "straight"))
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    elsewhere = warm.model_copy(update={"init_from": "never-was-there"})
    run(target, full_store, tmp_path / "second", elsewhere, steps=5, fields=saving, resume=True)


def test_a_draft_that_does_not_fit_leaves_no_trace_of_a_run(target: Target, full_store: Store, tmp_path: Path) -> None:
    run(target, full_store, tmp_path / "first", section("dflash"))
    load_run(tmp_path / "first", "last").save(tmp_path / "draft")
    other = warm_section("dflash", tmp_path / "draft", intermediate_size=48)
    with pytest.raises(DraftsmithError, match=r"layers\.0\.mlp\.up_proj\.weight: found \[64, 32\], wanted \[48, 32\]"):
        run(target, full_store, tmp_path / "second", other)
    assert not (tmp_path / "second").exists()
