"""The demo, stage by stage, on a tiny target: everything is made, nothing is made twice, and `fresh` starts over."""

import io
import json
import shutil

import pytest
from rich.console import Console

from draftsmith.base.progress import SilentProgress
from draftsmith.bench.figures import equal_share
from draftsmith.bench.records import read_report
from draftsmith.errors import DraftsmithError
from draftsmith.run.recipe import load_recipe
from draftsmith.stages.demo import GPU_OVERRIDES, RECIPE_FILE, demo_recipe, run_demo
from tests.support.tiny import tiny_model
from tests.support.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """What makes the demo small: another target, a few prompts, short answers, few steps."""
    directory = tmp_path_factory.mktemp("demo")
    tokens = tiny_tokenizer()
    tiny_model("llama", vocab_size=len(tokens), num_layers=8).save_pretrained(directory / "target")
    tokens.save_pretrained(directory / "target")
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{n}", "prompt": f"say {n}"}) + "\n" for n in range(5)))
    return [
        f"target.path={directory / 'target'}",
        "target.device=cpu",
        "draft.target_layer_ids=[1,4]",
        "draft.num_taps=null",
        f"data.prompts={prompts}",
        f"bench.prompts={prompts}",
        "regenerate.max_new_tokens=10",
        "bench.max_new_tokens=8",
        "train.max_steps=3",
        "train.device=cpu",
        "train.precision=fp32",
    ]


def demo(run, overrides, *, fresh=False):
    out = io.StringIO()
    report = run_demo(run, overrides, fresh=fresh, progress=SilentProgress(), console=Console(file=out, width=120))
    return report, out.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory, overrides):
    """A demo from nothing: its run, its report and what it showed."""
    run = tmp_path_factory.mktemp("made") / "run"
    return run, *demo(run, overrides)


@pytest.fixture
def run(made, tmp_path):
    """A copy of that run, times of change included."""
    return shutil.copytree(made[0], tmp_path / "run")


def contents(run):
    """Every file with its time of change, but the exported draft's and the recipe, which are written each time."""
    files = (path for path in run.rglob("*") if path.is_file() and not {"draft", RECIPE_FILE} & set(path.parts[-2:]))
    return {path: path.stat().st_mtime_ns for path in files}


def test_the_demo_makes_everything_and_shows_it(made, overrides):
    run, report, shown = made
    assert report == read_report(run / "bench.json")
    assert equal_share(report.answers) == 1.0
    assert "100 %" in shown
    assert str(run / "bench.html") in shown
    assert (run / "bench.html").is_file()
    assert f"draftsmith generate {run / RECIPE_FILE}" in shown
    assert load_recipe(run / RECIPE_FILE) == demo_recipe(run, overrides)
    assert (run / "draft" / "config.json").is_file()


def test_a_second_demo_skips_what_is_done(made, run, overrides):
    before = contents(run)
    report, shown = demo(run, overrides)
    assert report == made[1]
    assert contents(run) == before
    assert shown.count("done already") == 4


def test_changed_settings_redo_that_stage_and_what_follows(run, overrides):
    before = contents(run)
    demo(run, [*overrides, "train.max_steps=4"])
    changed = {path.relative_to(run).parts[0] for path, time in contents(run).items() if before.get(path) != time}
    assert changed == {"train", "stages", "bench.json", "bench.jsonl", "bench.html"}


def test_fresh_starts_over_and_spares_strangers(run, tmp_path, overrides):
    before = contents(run)
    demo(run, overrides, fresh=True)
    after = contents(run)
    assert all(after[path] > time for path, time in before.items() if path in after)

    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("years of work")
    with pytest.raises(DraftsmithError, match="not removed"):
        demo(stranger, overrides, fresh=True)
    assert (stranger / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("overrides", [(), GPU_OVERRIDES], ids=["CPU", "GPU"])
def test_the_demo_recipe_is_the_shipped_one(tmp_path, overrides):
    recipe = demo_recipe(tmp_path, [*overrides, "target.path=elsewhere"])
    assert recipe.run == tmp_path
    assert recipe.data.prompts == "shipped"
    assert recipe.bench.prompts == "shipped"
    # The draft may only be asked for what its rows can hold.
    assert recipe.data.max_length <= recipe.train.tokens_per_row
