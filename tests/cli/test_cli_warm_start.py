"""From one run to the next by commands: export a run directory, look before training, train on, export for a server."""

import json
import re
import shutil
from pathlib import Path

import pytest

from draftsmith.bench.figures import figures
from draftsmith.bench.records import read_report
from tests.cli.test_cli import fails, run, save_target, write_recipe

pytestmark = pytest.mark.filterwarnings("ignore")


def walk(recipe, *commands):
    for command in commands:
        status, _, errors = run(command, recipe)
        assert status == 0, errors


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def done(tmp_path_factory, target):
    """A recipe whose run has been walked to its export."""
    recipe = write_recipe(tmp_path_factory.mktemp("done"), target)
    walk(recipe, "regenerate", "capture", "train", "export")
    return recipe


def finetune(directory, target, start, **draft):
    fields = {"algorithm": "dflash", "init_from": str(start), **draft}
    recipe = write_recipe(directory, target)
    content = json.loads(recipe.read_text())
    recipe.write_text(json.dumps({**content, "draft": fields}))
    return recipe


def test_a_dry_run_needs_no_features_and_leaves_nothing(done, target, tmp_path):
    start = done.parent / "run" / "draft"
    recipe = finetune(tmp_path, target, start, block_size=3, mask_token_id=5)
    status, _, said = run("train", recipe, "--dry-run")
    assert status == 0, said
    for line in (
        f"train: starts from the draft {start} (dflash, layout zlab)",
        "train: from the checkpoint: num_hidden_layers = 1",
        "train: from the checkpoint: target_layer_ids = [2]",
        "train: from the checkpoint: dtype = float32",
        "train: different: mask_token_id is 0 there, 5 here",
        "train: different: block_size is 4 there, 3 here",
        "train: loaded: 14 of the checkpoint's 14 tensors",
        f"warning: {start}: mask_token_id is 0, this run has 5; masked slots read an embedding that the checkpoint was "
        "never trained on",
    ):
        assert line in said.splitlines(), said
    assert "from the checkpoint: block_size" not in said
    assert not (tmp_path / "run").exists()


def test_a_dry_run_names_the_head_that_starts_fresh(done, target, tmp_path):
    start = done.parent / "run" / "draft"
    recipe = finetune(tmp_path, target, start, algorithm="domino", gru_hidden_dim=4, emb_dim=3)
    status, _, said = run("train", recipe, "--dry-run")
    assert status == 0, said
    assert [line for line in said.splitlines() if "fresh" in line] == [
        "train: fresh: embed_proj.0",
        "train: fresh: embed_proj.2",
        "train: fresh: prefix_gru",
        f"warning: {start} lacks embed_proj.0, embed_proj.2, prefix_gru; they start with fresh weights",
    ]


def test_a_dry_run_says_everything_and_then_fails_where_training_would(done, target, tmp_path):
    recipe = finetune(tmp_path, target, done.parent / "run" / "draft", intermediate_size=12)
    message = fails("train", recipe, "--dry-run")
    assert "train: loaded:" in message
    assert re.search(r"layers\.0\.mlp\.up_proj\.weight: found \[\d+, 32\], wanted \[12, 32\]", message)
    walk(recipe, "regenerate")
    assert "does not fit the configured draft" in fails("capture", recipe)  # before hours of work
    assert not (tmp_path / "run" / "features").exists()


def test_a_dry_run_of_what_is_not_there(done, target, tmp_path):
    nowhere = tmp_path / "nowhere"
    assert f"there is no directory {nowhere}" in fails("train", finetune(tmp_path, target, nowhere), "--dry-run")


def test_a_dry_run_of_a_run_that_goes_on(done, target):
    assert "reached step 3; resume it (--resume)" in fails("train", done, "--dry-run")
    status, _, said = run("train", done, "--dry-run", "--resume", "draft.init_from=nowhere")
    assert status == 0, said
    assert f"goes on from step 3 of {done.parent / 'run' / 'train'}; draft.init_from (nowhere) is not read" in said
    assert "draft.block_size: the run has 4, the recipe 3" in fails(
        "train", done, "--dry-run", "--resume", "draft.block_size=3"
    )


def test_a_dry_run_without_a_checkpoint(target, tmp_path):
    status, _, said = run("train", write_recipe(tmp_path, target), "--dry-run")
    assert status == 0, said
    assert "train: starts from fresh weights (no draft.init_from)" in said
    assert "tapped layers [2] of 4" in said


def test_a_warm_run_is_resumed_without_the_draft_it_started_from(done, target, tmp_path):
    start = shutil.copytree(done.parent / "run" / "draft", tmp_path / "start")
    recipe = finetune(tmp_path, target, start)
    walk(recipe, "regenerate", "capture", "train")
    shutil.rmtree(start)
    status, _, errors = run("train", recipe, "--resume", "train.max_steps=5")
    assert status == 0, errors
    assert "step 5" in run("inspect", tmp_path / "run" / "train")[1]
    walk(recipe, "export")
    assert f"| started from | {start} |" in (tmp_path / "run" / "draft" / "README.md").read_text()


def test_a_run_directory_is_exported_without_its_recipe(done, target, tmp_path):
    directory = done.parent / "run"
    for source in (directory, directory / "train"):
        out = tmp_path / source.name
        status, _, said = run("export", source, "export.which=last", "--layout", "speculators", "--out", out)
        assert status == 0, said
        assert f"draft: step 3 in layout speculators at {out}; reads back as it was written" in said
        verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
        assert verifier == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    assert "unknown key `train`" in fails("export", directory, "train.lr=1e-4")
    assert "export.layout is 'zlap'" in fails("export", directory, "export.which=last", "--layout", "zlap")
    assert "no whole checkpoint" in fails("export", tmp_path)


def test_the_card_quotes_the_benchmark_of_these_weights(done):
    walk(done, "bench")
    directory = done.parent / "run"
    report = read_report(directory / "bench.json")
    length = figures(report, report.drafts[0], report.batch_sizes[0]).accept_length.value
    walk(done, "export")
    card = (directory / "draft" / "README.md").read_text()
    asked = f"{len(report.prompts)} prompts of {Path(report.setting['prompts']).name}, temperature 0"
    assert f"| accept length, measured | {length:.2f} tokens a verify on {asked} |" in card
    status, _, said = run("bench", done)
    assert status == 0
    assert "bench: done already" in said  # a card changes nothing that was measured
    walk_with = ["export.rope_scaling={factor: 2.0}"]
    status, _, said = run("export", done, *walk_with)
    assert status == 0, said
    assert "| accept length, measured | not measured |" in (directory / "draft" / "README.md").read_text()
    assert Path(directory / "draft" / "config.json").read_text().count('"yarn"') == 2


def test_the_card_quotes_no_benchmark_that_held_proposals_back(done, tmp_path):
    directory, tuned = done.parent / "run", tmp_path / "tuned.json"
    card = directory / "draft" / "README.md"
    asked = ("--block-size", 2, "--out", tuned, "bench.limit=1", "bench.max_new_tokens=4")
    status, _, said = run("tune", done, *asked)
    assert status == 0, said
    for options, length in (
        (("--tuned", tuned), "not measured"),
        (("engine.num_proposals=1",), "not measured"),
        ((), r"\d\.\d\d tokens a verify on .*"),
    ):
        status, _, said = run("bench", done, *options, "bench.max_new_tokens=8")
        assert status == 0, said
        walk(done, "export")
        assert re.search(rf"\| accept length, measured \| {length} \|", card.read_text()), options
    quoted, stamp = card.read_text(), directory / "stages" / "bench.json"
    content = json.loads(stamp.read_text())
    del content["settings"]["tuned"], content["settings"]["engine"]  # from before there were these
    stamp.write_text(json.dumps(content))
    walk(done, "export")
    assert card.read_text() == quoted
