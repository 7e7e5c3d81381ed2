"""The command line: each command reads a recipe and calls one function."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from draftsmith.cli.option_paths import PATH, cli_path, named_path
from draftsmith.cli.option_rules import CHECKED_IMPORTS, import_request, refuse_together, refuse_without
from draftsmith.cli.reporting import reporting, say
from draftsmith.decoding.options import SamplingFields
from draftsmith.errors import DraftsmithError

# What imports torch is imported inside the commands, so that `draftsmith --help` answers at once.
if TYPE_CHECKING:
    from draftsmith.stages.workspace import Workspace

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train, convert and run DFlash-family drafters for lossless speculative decoding.\n\n"
    "The way of a run: **regenerate** answers, **capture** features, **train**, **export**, **bench**. The "
    "commands of a run take a recipe (a YAML file, or the name of a shipped one) and dotted overrides, and work below "
    "the directory that the recipe calls `run`. Begin with `draftsmith demo`.",
)

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe (smollm2-dflash).")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the recipe, such as `train.lr=1e-4 run=runs/second`."),
]


def sampling_help(field: str) -> str:
    """What the recipe's sections say of this field."""
    return SamplingFields.model_fields[field].description or ""


FreshOption = Annotated[bool, typer.Option("--fresh", help="Remove what this stage has made before, and make it anew.")]
DraftOption = Annotated[
    Path | None,
    typer.Option("--draft", help="A draft directory. Left out: the one that `export` wrote.", **PATH),
]
TunedOption = Annotated[
    Path | None, typer.Option("--tuned", help="Decode with the settings that `tune` wrote.", **PATH)
]


@app.command()
def demo(
    run: Annotated[Path, typer.Option(help="Where the demo works and leaves its results.", **PATH)] = Path("runs/demo"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: remove the results of an earlier demo.")] = False,
    overrides: OverridesArgument = None,
) -> None:
    """The whole way on a small real model, in minutes, on a CPU or a GPU.

    Has SmolLM2-135M-Instruct answer the shipped prompts, captures its features, trains a small DFlash draft, exports it
    and measures it on held-out prompts against plain decoding. What is done already with the same settings is skipped.

    Example: `draftsmith demo --run runs/demo`
    """
    with reporting(run):
        from draftsmith.cli.console import start_console
        from draftsmith.stages.demo import run_demo

        run_demo(run, overrides or [], fresh=fresh, progress=start_console(), console=Console())


@app.command()
def regenerate(recipe: RecipeArgument, overrides: OverridesArgument = None, fresh: FreshOption = False) -> None:
    """Has the target itself answer prompts, so that the draft learns what the target says.

    Reads `data.prompts`, writes `RUN/answers.jsonl`. Uses the local engine, or an OpenAI-compatible server where the
    recipe gives `regenerate.endpoint`. An interrupted run continues where it stopped.

    Example: `draftsmith regenerate my.yaml data.prompts=prompts.jsonl regenerate.max_new_tokens=256`
    """
    with _workspace(recipe, overrides) as workspace:
        workspace.regenerate(fresh=fresh)


@app.command()
def capture(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    fresh: FreshOption = False,
    remask: Annotated[
        bool, typer.Option("--remask", help="Only write the data's new loss masks into the store; runs no target.")
    ] = False,
    foreign: Annotated[
        Path | None,
        typer.Option(
            "--import", help="Read these feature files of another project instead of running the target.", **PATH
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Whose files --import names: specforge, modelopt or speculators.")
    ] = None,
    tap_ids: Annotated[
        str | None, typer.Option(help="The 0-based layers that imported files hold, in their order: 1,9,17,25,33.")
    ] = None,
    final_state: Annotated[
        str | None, typer.Option(help="The imported final state: post_norm, pre_norm, or none.")
    ] = None,
    check_samples: Annotated[
        int | None,
        typer.Option(
            help="Imported documents to compare with what the target itself computes; 0 loads no target. "
            f"Left out: {CHECKED_IMPORTS}."
        ),
    ] = None,
) -> None:
    """Runs the target over conversations and stores the features that the draft's method needs.

    Reads `data.conversations`, or the run's regenerated answers; writes the store `RUN/features`. Says beforehand how
    many tokens and bytes that will be, and how long it takes. An interrupted capture continues where it stopped, also
    with another number of processes (`torchrun -m draftsmith capture ...`).

    Example: `draftsmith capture my.yaml data.conversations=chats.jsonl`
    """
    with reporting():
        refuse_together("--remask", remask, {"--fresh": fresh}, "--fresh removes the features that --remask keeps")
        request = import_request(foreign, source, tap_ids, final_state, check_samples, remask=remask)
    with _workspace(recipe, overrides) as workspace:
        if request is not None:
            workspace.import_features(request, fresh=fresh)
        elif remask:
            workspace.remask()
        else:
            workspace.capture(fresh=fresh)


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    fresh: FreshOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be loaded, fresh and different, and do nothing.")
    ] = False,
) -> None:
    """Trains a draft on a feature store.

    Reads `RUN/features`; writes checkpoints, `metrics.jsonl` and TensorBoard files below `RUN/train`. Ctrl-C finishes
    the running step, saves and stops; `--resume` goes on from there. `--dry-run` needs neither features nor a GPU.

    Example: `draftsmith train my.yaml train.lr=3e-4 train.epochs=2`
    """
    with reporting():
        refuse_together("--dry-run", dry_run, {"--fresh": fresh}, "--dry-run removes nothing")
        refuse_together("--resume", resume, {"--fresh": fresh}, "--fresh removes what --resume goes on from")
    with _workspace(recipe, overrides) as workspace:
        if dry_run:
            workspace.plan_training(resume=resume)
        else:
            workspace.train(resume=resume, fresh=fresh)


@app.command()
def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory, a recipe file, or the name of a shipped recipe.")
    ],
    overrides: OverridesArgument = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help="The files' layout: zlab, sglang, speculators (vLLM), modelopt.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The directory to write. Left out: `RUN/draft`.", **PATH)
    ] = None,
) -> None:
    """Writes the trained draft as a directory that other software loads.

    `export.which` picks the `best` or the `last` checkpoint. What was written is read again and compared, logits
    included; a README.md says what the draft is and how SGLang and vLLM serve it.

    Example: `draftsmith export runs/demo export.which=last --layout speculators --out my-draft`
    """
    directory = cli_path(run)
    if not directory.is_dir():
        with _workspace(run, overrides) as workspace:
            workspace.export(out, layout=layout)
        return
    with reporting():
        from draftsmith.cli.console import start_console
        from draftsmith.run.recipe import load_export_options
        from draftsmith.stages.workspace import export_directory

        start_console()
        named = [] if layout is None else [f"export.layout={layout}"]
        export_directory(directory, load_export_options([*(overrides or []), *named]), out, say=say)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A draft directory.", **named_path("IN"))],
    destination: Annotated[Path, typer.Argument(help="The directory to write.", **named_path("OUT"))],
    layout: Annotated[str, typer.Option("--layout", help="zlab, sglang, speculators or modelopt.")],
    source_layout: Annotated[
        str | None, typer.Option("--from", help="The layout of IN. Left out: recognised from its files.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="The target model, for layouts that carry parts of it (speculators).")
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read .pt, .pth, .bin, .ckpt (tensors only) as a last resort.")
    ] = False,
) -> None:
    """Writes a draft in another project's layout: the same tensors, bit by bit, and the same meaning.

    Reads z-lab, SGLang, SpecForge, Model-Optimizer, DeepSpec and speculators directories.

    Example: `draftsmith convert my-draft my-draft-vllm --layout speculators --target Qwen/Qwen3-8B`
    """
    with reporting():
        from draftsmith.drafts.convert import convert as convert_draft

        converted = convert_draft(
            source, destination, layout, source_layout=source_layout, target=target, allow_pickle=allow_pickle
        )
        for line in converted.lines():
            say(line)
        say(f"written to {destination}")


@app.command()
def generate(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="What to ask; may be repeated. Left out: standard input."),
    ] = None,
    draft: DraftOption = None,
    tuned: TunedOption = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without a draft.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help=sampling_help("temperature"))] = 0.0,
    top_p: Annotated[float, typer.Option(help=sampling_help("top_p"))] = 1.0,
    top_k: Annotated[int, typer.Option(help=sampling_help("top_k"))] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
) -> None:
    """Answers prompts with the target, speculatively: the target's own text, sooner.

    Example: `draftsmith generate my.yaml -p "Count to twenty." --max-new-tokens 100`
    """
    with reporting():
        about_drafts = {"--draft": draft is not None, "--tuned": tuned is not None}
        refuse_together("--plain", plain, about_drafts, "--plain decodes without a draft")
    with _workspace(recipe, overrides) as workspace:
        from draftsmith.decoding.sampling import SamplingOptions

        workspace.generate(
            prompt or [sys.stdin.read().strip()],
            draft=draft,
            tuned=tuned,
            plain=plain,
            max_new_tokens=max_new_tokens,
            sampling=SamplingOptions(temperature, top_p, top_k),
            seed=seed,
        )


@app.command()
def bench(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    draft: Annotated[
        list[Path] | None,
        typer.Option(
            "--draft", help="A draft directory; may be repeated. Left out: the one that `export` wrote.", **PATH
        ),
    ] = None,
    tuned: TunedOption = None,
    fresh: FreshOption = False,
) -> None:
    """Measures drafts: accept length, speed against plain decoding, and that the output is the same.

    Reads `bench.prompts`; writes `RUN/bench.json`, `RUN/bench.jsonl` and the page `RUN/bench.html`.

    Example: `draftsmith bench my.yaml --draft a --draft b bench.prompts=questions.jsonl bench.batch_size=[1,8]`
    """
    with _workspace(recipe, overrides) as workspace:
        workspace.bench(drafts=draft or (), tuned=tuned, fresh=fresh)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="The `bench.json` to compare with.", **named_path("A.json"))],
    second: Annotated[Path, typer.Argument(help="The `bench.json` to compare.", **named_path("B.json"))],
    first_draft: Annotated[
        str | None, typer.Option("--first", help="The draft of A to compare, where A measures several.")
    ] = None,
    second_draft: Annotated[
        str | None, typer.Option("--second", help="The draft of B to compare, where B measures several.")
    ] = None,
) -> None:
    """Holds two benchmarks against each other, prompt by prompt, and says when a difference is noise.

    Example: `draftsmith compare runs/a/bench.json runs/b/bench.json`
    """
    with reporting():
        from draftsmith.stages.inspect import comparison

        Console().print(comparison(first, second, first_draft, second_draft))


@app.command()
def tune(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    draft: DraftOption = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option("--block-size", help="A block size to try; may be repeated. Left out: the trained one and parts."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write. Left out: `RUN/tuned.json`.", **PATH)
    ] = None,
) -> None:
    """Finds the block size and the number of proposals that decode fastest on this machine.

    Answers `bench.prompts` at the first `bench.batch_size`, records what would be accepted at every token, measures
    what a cycle costs, and writes the best settings for `generate --tuned` and `bench --tuned`.

    Example: `draftsmith tune my.yaml bench.prompts=questions.jsonl bench.limit=16 bench.batch_size=4`
    """
    with _workspace(recipe, overrides) as workspace:
        workspace.tune(draft=draft, block_sizes=block_size, out=out)


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(help="A feature store, a run or training directory, or a draft directory.", **PATH)
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read a whole feature store: every checksum, offset and value range.")
    ] = False,
    sample: Annotated[
        str | None, typer.Option("--sample", metavar="ID", help="Show this document of a feature store with its mask.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Where the tokenizer for --sample lies. Left out: beside the store's target.")
    ] = None,
) -> None:
    """Says what a directory holds: layers, dtype, samples, tokens, bytes, where it comes from.

    Example: `draftsmith inspect runs/demo/features --verify`
    """
    with reporting(path):
        refuse_together("--sample", sample is not None, {"--verify": verify}, "each shows another thing")
        refuse_without("--sample", sample is not None, {"--tokenizer": tokenizer is not None})
        from draftsmith.cli.console import start_console
        from draftsmith.stages.inspect import inspect_directory, sample_view, verified_directory

        if sample is not None:
            Console().print(sample_view(path, sample, tokenizer))
        elif verify:
            store = verified_directory(path, start_console(), say)
            say(f"{store}: every checksum, offset and value is as it should be")
        else:
            Console().print(inspect_directory(path))


@app.command()
def schema() -> None:
    """Prints the JSON schema of recipes, for editors and checkers.

    Example: `draftsmith schema > recipe.schema.json`
    """
    import json

    from draftsmith.run.recipe import Recipe

    typer.echo(json.dumps(Recipe.model_json_schema(), indent=1))


@app.command()
def algorithms(
    recipe: Annotated[
        str | None, typer.Option(help="Compare in the dimensions of this recipe's draft. Left out: Qwen3-8B's.")
    ] = None,
    overrides: OverridesArgument = None,
) -> None:
    """Lists the methods that `draft.algorithm` may name, and what each stores, proposes and adds to the draft.

    Example: `draftsmith algorithms --recipe smollm2-dflash`
    """
    with reporting():
        from draftsmith.run.recipe import load_recipe
        from draftsmith.stages.inspect import algorithm_table

        if recipe is None and overrides:
            raise DraftsmithError(f"{overrides[0]!r} overrides a recipe, and none is given; name it with --recipe")
        Console().print(algorithm_table(None if recipe is None else load_recipe(recipe, overrides or [])))


@contextmanager
def _workspace(recipe: str, overrides: list[str] | None) -> Iterator["Workspace"]:
    """The stages of a recipe, with errors reported as `reporting` does."""
    with reporting():
        from draftsmith.cli.console import start_console
        from draftsmith.run.recipe import load_recipe
        from draftsmith.stages.workspace import Workspace

        loaded = load_recipe(recipe, overrides or [])
        with reporting(loaded.run):
            yield Workspace(loaded, progress=start_console(), say=say)


def main() -> None:
    """Entry point of `draftsmith`."""
    app()
