"""What a dry run says of a training against what the training then takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.features.reader import Store
from draftsmith.targets.info import TargetInfo
from draftsmith.training.forecast import forecast
from draftsmith.training.options import TrainOptions
from draftsmith.training.start import Start, find_start
from draftsmith.training.tracking import METRICS_FILE
from tests.cli.test_cli import fails, run, save_target, write_recipe

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def recipe(tmp_path: Path, target: Path) -> Path:
    return write_recipe(tmp_path, target)


def dry(recipe: Path, *overrides: str) -> dict[str, str]:
    status, _, said = run("train", recipe, "--dry-run", *overrides)
    assert status == 0, said
    lines = [line.removeprefix("train: ") for line in said.splitlines()]
    return {
        name: line.partition(": ")[2] for line in lines for name in ("steps", "memory", "time") if line.startswith(name)
    }


def test_without_features_only_the_recipe_speaks(recipe: Path) -> None:
    said = dry(recipe)
    assert said["steps"] == "3 (train.max_steps); how many documents is known once there are features"
    assert dry(recipe, "train.max_steps=null", "train.epochs=4")["steps"] == (
        "known once there are features: 4 passes over them (train.epochs)"
    )
    assert said["time"] == "known after the first steps, whose progress shows what is left"


def test_steps_and_time_are_those_of_the_run(recipe: Path) -> None:
    for command in ("regenerate", "capture"):
        assert run(command, recipe)[0] == 0
    directory = recipe.parent / "run"
    store = Store.open(directory / "features")
    overrides = ["train.max_steps=null", "train.epochs=4", "train.tokens_per_row=64", "track.every=1"]
    said = dry(recipe, *overrides)
    tokens = sum(store.lengths)
    assert f"which is 4 passes over {len(store)} documents with {tokens:,} tokens" in said["steps"]
    assert not (directory / "train").exists()
    assert run("train", recipe, *overrides)[0] == 0
    entries = [json.loads(line) for line in (directory / "train" / METRICS_FILE).read_text().splitlines()]
    steps = max(entry["step"] for entry in entries)
    assert said["steps"].startswith(f"{steps:,}, which")

    (directory / "train" / METRICS_FILE).write_text(
        json.dumps({"kind": "train", "step": 1, "tokens_per_second": 2.0}) + "\n{torn"
    )
    more = dry(recipe, *overrides, "train.epochs=6", "--resume")
    assert f", of which {steps} are done" in more["steps"]
    seconds = tokens * 2 / 2.0
    assert f"{seconds:.0f} s for the steps left" in more["time"] or f"{seconds / 60:.0f} min for" in more["time"]


def memory(start: Start, info: TargetInfo, **options: Any) -> str:
    (line,) = (line for line in forecast(start, info, None, TrainOptions(**options)) if line.startswith("memory"))
    return line


def test_memory_is_what_the_tensors_take(recipe: Path, target: Path, tmp_path: Path) -> None:
    from draftsmith.drafts.draft import Draft
    from draftsmith.run.recipe import load_recipe

    loaded = load_recipe(recipe)
    info = TargetInfo.load(loaded.target)
    start = find_start(loaded.draft, info, loaded.training, resume=False)
    draft = Draft.from_config(start.config)
    parameters = [parameter.numel() for parameter in draft.parameters()]
    linear = sum(
        p.numel() for m in draft.modules() if isinstance(m, torch.nn.Linear) for p in m.parameters(recurse=False)
    )
    ends = 2 * info.vocab_size * info.hidden_size
    taps = len(start.config.target_layer_ids) * info.hidden_size

    def kib(size: float) -> str:
        return f"{size / 1024:.1f} KiB"

    plain = memory(start, info, device="cpu", tokens_per_row=96)
    assert f"{kib(16 * sum(parameters))} weights, gradients" in plain
    assert f"{kib(4 * ends)} the target's embedding" in plain
    assert f"{kib(4 * 96 * taps)} features of a forward of 96 tokens" in plain
    half = memory(start, info, device="cpu", precision="bf16", tokens_per_row=96, rows_per_step=2, rows_per_forward=2)
    assert f"{kib(16 * sum(parameters) + 2 * linear)} weights, gradients" in half
    assert f"{kib(4 * ends)} the target's embedding" in half  # the checkpoint's own fp32
    assert f"{kib(2 * 192 * taps)} features of a forward of 192 tokens" in half
    assert "on cuda (" in memory(start, info, device="cuda:5")  # a plan for another machine


def test_a_dry_run_fails_where_training_would(recipe: Path) -> None:
    for command in ("regenerate", "capture"):
        assert run(command, recipe)[0] == 0
    assert "of the 6 documents" in fails("train", recipe, "--dry-run", "train.tokens_per_row=20")
    assert "tap_ids: the store has [2], the draft needs [1]" in fails(
        "train", recipe, "--dry-run", "draft.num_taps=null", "draft.target_layer_ids=[1]"
    )
    assert "the tokenizer's eos token" in fails("train", recipe, "--dry-run", "draft.mask_token_id=2")
