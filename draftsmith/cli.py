"""The command line: each command reads a recipe and calls one function."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from draftsmith.errors import DraftsmithError

# What imports torch is imported inside the commands, so that `draftsmith --help` answers at once.
if TYPE_CHECKING:
    from draftsmith.workspace import Workspace

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
FreshOption = Annotated[bool, typer.Option("--fresh", help="Remove what this stage has made before, and make it anew.")]
DraftOption = Annotated[
    Path | None,
    typer.Option("--draft", help="A draft directory. Left out: the one that `export` wrote."),
]
TunedOption = Annotated[Path | None, typer.Option("--tuned", help="Decode with the settings that `tune` wrote.")]


@app.command()
def demo(
    run: Annotated[Path, typer.Option(help="Where the demo works and leaves its results.")] = Path("runs/demo"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: remove the results of an earlier demo.")] = False,
    overrides: OverridesArgument = None,
) -> None:
    """The whole way on a small real model, in minutes, on a CPU or a GPU.

    Has SmolLM2-135M-Instruct answer the shipped prompts, captures its features, trains a small DFlash draft, exports it
    and measures it on held-out prompts against plain decoding. What is done already with the same settings is skipped.

    Example: `draftsmith demo --run runs/demo`
    """
    with _reporting(run):
        from draftsmith.console import start_console
        from draftsmith.demo import run_demo

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
        Path | None, typer.Option("--import", help="Read these feature files of another project; runs no target.")
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
        int, typer.Option(help="Imported documents to compare with what the target itself computes; 0 loads no target.")
    ] = 2,
) -> None:
    """Runs the target over conversations and stores the features that the draft's method needs.

    Reads `data.conversations`, or the run's regenerated answers; writes the store `RUN/features`. Says beforehand how
    many tokens and bytes that will be, and how long it takes. An interrupted capture continues where it stopped, also
    with another number of processes (`torchrun -m draftsmith capture ...`).

    Example: `draftsmith capture my.yaml data.conversations=chats.jsonl`
    """
    said = {"--from": source, "--tap-ids": tap_ids, "--final-state": final_state}
    with _workspace(recipe, overrides) as workspace:
        if foreign is None:
            given = [name for name, value in said.items() if value is not None]
            if given:
                raise DraftsmithError(f"{given[0]} says what imported files hold; name them with --import")
            workspace.remask() if remask else workspace.capture(fresh=fresh)
            return
        missing = [name for name, value in said.items() if value is None]
        if missing or remask:
            wrong = f"{', '.join(missing)} missing" if missing else "--remask given too"
            raise DraftsmithError(
                f"--import needs what the files do not say: --from, --tap-ids, --final-state ({wrong})"
            )
        workspace.import_features(
            foreign, str(source), _layers(str(tap_ids)), str(final_state), check_samples=check_samples, fresh=fresh
        )


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
    out: Annotated[Path | None, typer.Option("--out", help="The directory to write. Left out: `RUN/draft`.")] = None,
) -> None:
    """Writes the trained draft as a directory that other software loads.

    `export.which` picks the `best` or the `last` checkpoint. What was written is read again and compared, logits
    included; a README.md says what the draft is and how SGLang and vLLM serve it.

    Example: `draftsmith export runs/demo export.which=last --layout speculators --out my-draft`
    """
    if not Path(run).is_dir():
        with _workspace(run, overrides) as workspace:
            workspace.export(out, layout=layout)
        return
    with _reporting(None):
        from draftsmith.console import start_console
        from draftsmith.recipe import load_export_options
        from draftsmith.workspace import export_directory

        start_console()
        named = [] if layout is None else [f"export.layout={layout}"]
        export_directory(Path(run), load_export_options([*(overrides or []), *named]), out, say=_say)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A draft directory.")],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.")],
    layout: Annotated[str, typer.Option("--layout", help="zlab, sglang, speculators or modelopt.")],
    source_layout: Annotated[
        str | None, typer.Option("--from", help="The layout of IN. Left out: recognised from its files.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="The target model, for layouts that carry parts of it (speculators).")
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read .pt and .bin weights (tensors only) where there are no others.")
    ] = False,
) -> None:
    """Writes a draft in another project's layout: the same tensors, bit by bit, and the same meaning.

    Reads z-lab, SGLang, SpecForge, Model-Optimizer, DeepSpec and speculators directories.

    Example: `draftsmith convert my-draft my-draft-vllm --layout speculators --target Qwen/Qwen3-8B`
    """
    with _reporting(None):
        from draftsmith.drafts.convert import convert as convert_draft
        from draftsmith.drafts.convert import target_parts

        parts = target_parts(target) if target else None
        converted = convert_draft(
            source, destination, layout, source_layout=source_layout, target=parts, allow_pickle=allow_pickle
        )
        for line in converted.lines():
            _say(line)


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
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set of tokens with this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the so many likeliest tokens; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
) -> None:
    """Answers prompts with the target, speculatively: the same text as without the draft, sooner.

    Example: `draftsmith generate my.yaml -p "Count to twenty." --max-new-tokens 100`
    """
    with _workspace(recipe, overrides) as workspace:
        texts = prompt or [sys.stdin.read().strip()]
        workspace.generate(
            texts,
            draft=draft,
            tuned=tuned,
            plain=plain,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
        )


@app.command()
def bench(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    draft: Annotated[
        list[Path] | None,
        typer.Option("--draft", help="A draft directory; may be repeated. Left out: the one that `export` wrote."),
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
    first: Annotated[Path, typer.Argument(metavar="A.json", help="The `bench.json` to compare with.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="The `bench.json` to compare.")],
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
    with _reporting(None):
        from draftsmith.bench.compare import compare as compare_reports
        from draftsmith.bench.records import read_report
        from draftsmith.inspect import comparison_table

        found = compare_reports(read_report(first), read_report(second), first_draft, second_draft)
        Console().print(comparison_table(found))


@app.command()
def tune(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    draft: DraftOption = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option("--block-size", help="A block size to try; may be repeated. Left out: the trained one and parts."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write. Left out: `RUN/tuned.json`.")] = None,
) -> None:
    """Finds the block size, number of proposals and threshold that decode fastest on this machine.

    Answers `bench.prompts` at the first `bench.batch_size`, records what would be accepted at every token, measures
    what a cycle costs, and writes the best settings for `generate --tuned` and `bench --tuned`.

    Example: `draftsmith tune my.yaml bench.prompts=questions.jsonl bench.limit=16 bench.batch_size=4`
    """
    with _workspace(recipe, overrides) as workspace:
        workspace.tune(draft=draft, block_sizes=block_size, out=out)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A feature store, a run or training directory, or a draft directory.")],
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
    with _reporting(path):
        from draftsmith.console import start_console
        from draftsmith.features.verify import verify_store
        from draftsmith.inspect import inspect_directory, sample_view, store_directory

        if sample is not None:
            Console().print(sample_view(path, sample, tokenizer))
        elif verify:
            store = store_directory(path)
            faults = verify_store(store, start_console())
            for fault in faults:
                _say(f"damaged: {fault}")
            if faults:
                raise DraftsmithError(
                    f"{store} has {len(faults)} faults; delete both files of a damaged shard and capture again"
                )
            _say(f"{store}: every checksum, offset and value is as it should be")
        else:
            Console().print(inspect_directory(path))


@app.command()
def schema() -> None:
    """Prints the JSON schema of recipes, for editors and checkers.

    Example: `draftsmith schema > recipe.schema.json`
    """
    import json

    from draftsmith.recipe import Recipe

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
    with _reporting(None):
        from draftsmith.inspect import algorithm_table
        from draftsmith.recipe import load_recipe

        if recipe is None and overrides:
            raise DraftsmithError(f"{overrides[0]!r} overrides a recipe, and none is given; name it with --recipe")
        Console().print(algorithm_table(None if recipe is None else load_recipe(recipe, overrides or [])))


def _layers(text: str) -> tuple[int, ...]:
    """Layer ids as `1,9,17`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise DraftsmithError(f"--tap-ids is {text!r}; give layers separated by commas, such as 1,9,17") from None


def _say(line: str) -> None:
    """One line of result on standard error: standard output is for what a program may read. Of several processes that a
    launcher started, the first one speaks."""
    if os.environ.get("RANK", "0") != "0":
        return
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _workspace(recipe: str, overrides: list[str] | None) -> Iterator["Workspace"]:
    """The stages of a recipe, with errors reported as `_reporting` does."""
    with _reporting(None):
        from draftsmith.console import start_console
        from draftsmith.recipe import load_recipe
        from draftsmith.workspace import Workspace

        loaded = load_recipe(recipe, overrides or [])
        with _reporting(loaded.run):
            yield Workspace(loaded, progress=start_console(), say=_say)


@contextmanager
def _reporting(run: Path | None) -> Iterator[None]:
    """A user's error is one message and exit status 1; Ctrl-C says what is kept, and exits with 130."""
    complaints = Console(stderr=True)
    try:
        yield
    except DraftsmithError as error:
        complaints.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        kept = f" What is finished is kept in {run}: the same command goes on from there." if run else ""
        complaints.print(f"interrupted.{kept}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None


def main() -> None:
    """Entry point of `draftsmith`."""
    app()
