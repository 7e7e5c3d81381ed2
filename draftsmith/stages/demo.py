"""The whole way on a small real model: a shipped recipe, stage by stage through the same functions as the commands."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.base.progress import Progress
from draftsmith.bench.figures import figures
from draftsmith.bench.headline import estimate, summary_rows
from draftsmith.bench.records import BenchReport
from draftsmith.errors import DraftsmithError
from draftsmith.run.recipe import Recipe, load_recipe, save_recipe
from draftsmith.stages.workspace import Workspace

DEMO_RECIPE = "smollm2-dflash"
RECIPE_FILE = "recipe.yaml"

# A GPU has the time for longer answers and more passes over them.
GPU_OVERRIDES = (
    "data.max_length=2048",
    "regenerate.max_new_tokens=256",
    "regenerate.batch_size=128",
    "draft.num_hidden_layers=5",
    "draft.block_size=8",
    "draft.objective.negatives=null",
    "train.max_steps=null",
    "train.epochs=40",
    "train.lr=1e-3",
    "train.num_anchors=256",
    "train.tokens_per_row=2048",
    "train.precision=bf16",
    "bench.limit=null",
    "bench.max_new_tokens=256",
)


def demo_recipe(run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The demo's recipe for this machine, working under `run`."""
    gpu = GPU_OVERRIDES if torch.cuda.is_available() else ()
    return load_recipe(DEMO_RECIPE, [*gpu, f"run={run}", *overrides])


def run_demo(run: Path, overrides: Sequence[str], *, fresh: bool, progress: Progress, console: Console) -> BenchReport:
    """Runs every stage that is not done yet, prints the result and what to do next, and returns the measurement.

    Raises `DraftsmithError` where the demo's model is not installed, or `fresh` meets a directory that is no run's.
    """
    recipe = demo_recipe(run, overrides)
    if fresh:
        _start_over(run)
    workspace = Workspace(
        recipe, progress=progress, say=partial(console.print, highlight=False, markup=False, soft_wrap=True), redo=True
    )
    workspace.regenerate()
    workspace.capture()
    workspace.train()
    workspace.export()
    report = workspace.bench()
    save_recipe(recipe, run / RECIPE_FILE)
    console.print(result_table(report))
    console.print(next_steps(recipe), highlight=False, soft_wrap=True)
    return report


def _start_over(run: Path) -> None:
    if run.exists() and any(run.iterdir()) and not (run / "stages").is_dir():
        raise DraftsmithError(
            f"{run} holds other things than a run of draftsmith; it is not removed. Choose another --run"
        )
    shutil.rmtree(run, ignore_errors=True)


def result_table(report: BenchReport) -> Table:
    """The headline figures of the held-out prompts."""
    table = Table(title="Held-out prompts", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in summary_rows(report):
        table.add_row(label, value)
    found = figures(report, report.drafts[0], report.batch_sizes[0])
    for category, length in found.accept_length_by_category.items():
        table.add_row(f"  accept length, {category}", estimate(length))
    return table


def next_steps(recipe: Recipe) -> str:
    """Where the results lie, and commands that go on from them, with the recipe that the run keeps."""
    run, train = recipe.run, recipe.train
    kept = run / RECIPE_FILE
    longer = f"train.epochs={2 * train.epochs}" if train.max_steps is None else f"train.max_steps={2 * train.max_steps}"
    return (
        f"the report: {recipe.bench_page.resolve()}\n"
        "go on with:\n"
        f"  draftsmith generate {kept} -p 'Count from 1 to 20.'\n"
        f"  draftsmith inspect {run}\n"
        f"  draftsmith train {kept} --resume {longer}\n"
        f"  draftsmith export {kept}\n"
        f"  draftsmith bench {kept} bench.max_new_tokens=256"
    )
