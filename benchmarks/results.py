"""Accept length and speed of every method after the same time of training: the table of `docs/results.md`.

    python benchmarks/results.py all --conversations answers.jsonl --prompts gsm8k=gsm8k.jsonl \
        --prompts mt-bench=mt-bench.jsonl
    python benchmarks/results.py method dspark domino ...    # some methods, where the time on a machine is short
    python benchmarks/results.py capture ...                 # the features alone
    python benchmarks/results.py table                       # what all calls so far add up to

Captures the answers once, with the layout of the method that stores most, and trains each method's draft from that
store for `--seconds` of wall time. The clock runs over the whole call of the training: building the draft, starting the
processes that read, saving. Only torch.compile's work is not in it: of two short runs before, one compiles and one says
how many steps the seconds hold, so that the learning rate falls to its end within them; what they took is reported
beside the training.
The last checkpoint is exported and benched: accept lengths on all prompts in large batches, speeds one row at a time on
the first prompts of `--speed-on`. Each method leaves OUT/METHOD.json, written anew after every part; `table` writes
them into the page between its two markers. A method that fails is reported, and the others go on.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.base.devices import resolve_device
from draftsmith.base.progress import Stage
from draftsmith.bench.chat import Chat
from draftsmith.bench.decoders import DraftEntry
from draftsmith.bench.figures import Figures, figures
from draftsmith.bench.headline import estimate, number, percent
from draftsmith.bench.intervals import Estimate
from draftsmith.bench.machine import machine
from draftsmith.bench.measure import bench, write_benchmark
from draftsmith.bench.options import BenchOptions
from draftsmith.cli.console import ConsoleProgress
from draftsmith.data.prompts import find_prompts
from draftsmith.errors import DraftsmithError
from draftsmith.run.recipe import Recipe, load_recipe
from draftsmith.stages.workspace import Workspace
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.target import Target

STORES_MOST = "dspark"
# The decay of position weights: e^(-1/4) = 0.78 is about the chance that the next slot is right, of drafts that accept
# three or four tokens. The papers' 7, for blocks of 16, fits drafts that accept six and more.
GAMMA = "draft.objective.weighting.gamma=4"
DPACE = ("draft.objective.weighting=null", "draft.objective.weighting={kind: dpace, alpha: 0.5}")
# Steps of a draft so small take the host longer to launch than the device to compute.
GRAPHS = "train.graphs=true"
# Methods by the recipe `smollm2-METHOD`, and what each needs beyond what all share.
METHODS: dict[str, tuple[str, ...]] = {
    "dflash": (GRAPHS, GAMMA, "draft.objective.negatives=null"),  # the CPU recipe samples the vocabulary
    "dpace": (GRAPHS,),
    "domino": (GRAPHS, GAMMA, "draft.emb_dim=128"),
    "dspark": (GRAPHS, GAMMA, "draft.markov_rank=128"),
    "dflash2": (GRAPHS, *DPACE, "draft.selector_rank=128"),
}
TITLES = {
    "dflash": "DFlash",
    "dpace": "DFlash with D-PACE",
    "domino": "Domino",
    "dspark": "DSpark",
    "dflash2": "DFlash 2 with D-PACE",
}
# What the methods share here, whatever their CPU recipes say.
SHARED = (
    "target.dtype=bfloat16",
    "draft.num_hidden_layers=5",
    "draft.block_size=16",
    "draft.num_taps=5",
    "draft.mask_token_id=16",
    "draft.dtype=bfloat16",
    "data.max_length=1024",
    "capture.dtype=bfloat16",
    "capture.tokens_per_batch=65536",
    "train.precision=bf16",
    "train.seed=0",
    "train.lr=1.2e-3",
    "train.num_anchors=128",
    "train.tokens_per_row=4800",
    "train.rows_per_step=1",
    "train.rows_per_forward=1",
    "train.eval_share=0.0",
    "train.data_workers=8",
    "export.which=last",
    "track.every=100",
    "track.tensorboard=false",
)
COMPILING_STEPS = 60  # until rows have come for which torch.compile makes code of their own
UNSETTLED_STEPS = 300  # until most shapes have come up and what was read ahead is used up
CALIBRATION_STEPS = 400
RECORDING = 2.5  # times the median: the step recorded a graph for a shape that had not come before
MARGIN = 0.97  # of the seconds, for shapes that come up late and rows that take longer than those of the calibration
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def main() -> int:
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.command == "table":
        write_table(arguments)
        return 0
    wanted = {"all": list(METHODS), "capture": []}.get(arguments.command, getattr(arguments, "methods", []))
    failed = False
    for method in [None, *wanted]:
        try:
            line = _capture(arguments) if method is None else _method(method, arguments)
        except (DraftsmithError, RuntimeError, ValueError, OSError) as error:
            failed = True
            traceback.print_exc()
            line = {"part": method or "capture", "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(line), flush=True)
    if arguments.command == "all":
        write_table(arguments)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    everything = commands.add_parser("all", help="capture, every method, the table")
    some = commands.add_parser("method", help="capture if that is not done, and some methods")
    some.add_argument("methods", nargs="+", choices=list(METHODS), metavar="METHOD")
    captured = commands.add_parser("capture", help="the features alone")
    table = commands.add_parser("table", help="the table of what is there")
    for command in (everything, some, captured):
        command.add_argument("--conversations", type=Path, required=True, help="JSONL of the target's own answers")
        command.add_argument(
            "--prompts", action="append", default=[], help="NAME=SOURCE: prompts to bench on, as for bench.prompts"
        )
        command.add_argument("--work", type=Path, default=None, help="directory of store and runs (default: OUT)")
        command.add_argument("--seconds", type=float, default=170.0, help="wall time of each training")
        command.add_argument("--steps", type=int, default=None, help="steps of each training, in place of --seconds")
        command.add_argument("--limit", default="gsm8k=200,mt-bench=80", help="NAME=N,...: the first N prompts")
        command.add_argument("--max-new-tokens", type=int, default=256)
        command.add_argument("--batch-size", type=int, default=100, help="of the bench of accept lengths")
        command.add_argument("--speed-prompts", type=int, default=24, help="prompts of the bench at batch size 1")
        command.add_argument("--speed-on", action="append", help="NAME of prompts to time (default: the first)")
        command.add_argument("--set", action="append", default=[], dest="overrides", help="a further recipe override")
    for command in (everything, some, captured, table):
        command.add_argument("--out", type=Path, default=Path("runs/results"), help="directory of the results")
        command.add_argument("--page", type=Path, default=Path("docs/results.md"), help="the page to write into")
    return parser.parse_args()


_LOADED: dict[TargetOptions, Target] = {}
"""The target is loaded once, before anything is timed."""


# --- the work ---------------------------------------------------------------------------------------------------------


def _workspace(method: str, arguments: argparse.Namespace, run: str, *further: str) -> Workspace:
    work = arguments.work or arguments.out
    overrides = [f"run={work / run}", f"data.conversations={arguments.conversations}"]
    recipe = load_recipe(f"smollm2-{method}", [*SHARED, *METHODS[method], *overrides, *arguments.overrides, *further])
    workspace = Workspace(recipe, progress=ConsoleProgress(), say=_say, redo=True)
    if recipe.target not in _LOADED:
        _LOADED[recipe.target] = workspace.target
    workspace.target = _LOADED[recipe.target]
    return workspace


def _capture(arguments: argparse.Namespace) -> dict[str, object]:
    started = time.perf_counter()
    workspace = _workspace(STORES_MOST, arguments, "store")
    workspace.capture()
    return {"part": "capture", "seconds": round(time.perf_counter() - started, 1)}


def _method(method: str, arguments: argparse.Namespace) -> dict[str, object]:
    store = (arguments.work or arguments.out) / "store" / "features"
    where = machine(resolve_device("auto"))
    line: dict[str, Any] = {"part": method, "machine": where, "settings": _settings(method, arguments)}
    steps = arguments.steps
    if steps is None:
        found = _calibrated(method, arguments, store)
        line |= {"calibration": found}
        steps = max(1, int((MARGIN * arguments.seconds - found["start_seconds"]) / found["step_seconds"]))
    workspace = _linked(_workspace(method, arguments, method, f"train.max_steps={steps}"), store)
    line |= {"steps": steps, "training_seconds": round(_train(workspace), 1)}
    line |= {"last_log_entry": _log_entries(workspace.recipe)[-1], "benches": {}}
    _write(method, arguments, line)
    workspace.export()
    limits = {name: int(count) for name, _, count in (part.partition("=") for part in arguments.limit.split(","))}
    for kind, batch_size in (("accepted", arguments.batch_size), ("alone", 1)):
        for named in arguments.prompts:
            name, _, source = named.partition("=")
            if kind == "alone" and name not in (arguments.speed_on or [arguments.prompts[0].partition("=")[0]]):
                continue
            limit = limits.get(name) if kind == "accepted" else arguments.speed_prompts
            started = time.perf_counter()
            measured = _bench(workspace, method, arguments, name, source, limit, batch_size).to_json()
            line["benches"].setdefault(name, {})[kind] = measured
            _write(method, arguments, line)
            _say(f"{method}: {name}, batch size {batch_size}, in {time.perf_counter() - started:.1f} s")
    return line


def _settings(method: str, arguments: argparse.Namespace) -> list[str]:
    return [*SHARED, *METHODS[method], *arguments.overrides]


def _calibrated(method: str, arguments: argparse.Namespace, store: Path) -> dict[str, float]:
    """Seconds of a step, and of what a training takes besides its steps, from a short run like it; another before it
    compiles what both then use."""
    started = time.perf_counter()
    _train(_linked(_workspace(method, arguments, f"{method}-compiling", f"train.max_steps={COMPILING_STEPS}"), store))
    compiled = time.perf_counter()
    steps = f"train.max_steps={CALIBRATION_STEPS}"
    workspace = _linked(_workspace(method, arguments, f"{method}-calibration", steps), store)
    workspace.progress = clocked = _ClockedProgress()
    begun = time.perf_counter()
    _train(workspace)
    ended = time.perf_counter()
    settled = clocked.times[UNSETTLED_STEPS - 1 :]
    lengths = [later - earlier for earlier, later in itertools.pairwise(settled)]
    usual = [length for length in lengths if length < RECORDING * statistics.median(lengths)]
    step = statistics.fmean(usual)
    found = {
        "step_seconds": step,
        "start_seconds": max(0.0, ended - begun - CALIBRATION_STEPS * step),
        "compiling_seconds": compiled - started,
        "calibration_seconds": ended - started,
    }
    found = {name: round(value, 4) for name, value in found.items()}
    _say(f"{method}: {1 / step:.2f} steps/s, {json.dumps(found)}")
    return found


class _ClockedProgress(ConsoleProgress):
    """Remembers when each step of a training ended."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    @contextmanager
    def stage(self, name: str, total: float | None, unit: str) -> Iterator[Stage]:
        with super().stage(name, total, unit) as stage:
            yield _ClockedStage(stage, self.times)


class _ClockedStage:
    def __init__(self, stage: Stage, times: list[float]) -> None:
        self._stage, self._times = stage, times

    def advance(self, amount: float = 1.0, **fields: str) -> None:
        if amount:
            self._times.append(time.perf_counter())
        self._stage.advance(amount, **fields)


def _train(workspace: Workspace) -> float:
    started = time.perf_counter()
    workspace.train(fresh=True)
    return time.perf_counter() - started


def _write(method: str, arguments: argparse.Namespace, line: dict[str, Any]) -> None:
    (arguments.out / f"{method}.json").write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")


def _linked(workspace: Workspace, store: Path) -> Workspace:
    """The same, with the shared store in its place."""
    recipe = workspace.recipe
    recipe.run.mkdir(parents=True, exist_ok=True)
    if not recipe.features.exists():
        recipe.features.symlink_to(store.resolve())
    return workspace


def _bench(
    workspace: Workspace,
    method: str,
    arguments: argparse.Namespace,
    name: str,
    source: str,
    limit: int | None,
    batch_size: int,
) -> Figures:
    recipe, target = workspace.recipe, workspace.target
    options = BenchOptions(
        prompts=source,
        limit=limit,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=(batch_size,),
        shown=4 if batch_size > 1 else 0,
    )
    report = bench(
        target,
        [DraftEntry(method, workspace.load_draft(None), recipe.draft_directory)],
        find_prompts(source, "heldout")[:limit],
        options,
        Chat(target.tokenizer, recipe.data),
        recipe.engine,
        stop_token_ids=workspace.stop_ids,
        progress=ConsoleProgress(),
    )
    stem = arguments.out / f"{method}-{name}-batch-{batch_size}"
    write_benchmark(report, *(stem.with_name(f"{stem.name}.{kind}") for kind in ("json", "jsonl", "html")))
    return figures(report, report.drafts[0], batch_size)


def _log_entries(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (recipe.training / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# --- the table --------------------------------------------------------------------------------------------------------


def write_table(arguments: argparse.Namespace) -> None:
    """Prints the table of all methods that have results, and puts it into the page."""
    found = [arguments.out / f"{method}.json" for method in METHODS]
    lines = [json.loads(path.read_text(encoding="utf-8")) for path in found if path.is_file()]
    if not any(line["benches"] for line in lines):
        raise SystemExit(f"there are no benched results in {arguments.out}; run `all` or `method` with --prompts first")
    table = "\n".join(table_lines(lines))
    print(table)
    text = arguments.page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{arguments.page} has no lines {BEGIN} and {END} to write between")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    arguments.page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def table_lines(results: list[dict[str, Any]]) -> list[str]:
    """The Markdown table of several methods' results, and what they were measured on."""
    names = list(dict.fromkeys(name for result in results for name in result["benches"]))
    header = ["method", "steps", "training", "compiling and calibrating before it"]
    for name in names:
        header += [f"{name}: accept length (95 %)", f"{name}: answers equal, width 1 / verify's"]
    header += [
        f"{names[0]}, batch 1: plain tokens/s",
        "speculative tokens/s",
        "speed-up (95 %)",
        "speed-up of decoding",
    ]
    rows = [header, ["---"] * len(header)]
    for result in results:
        row = [TITLES[result["part"]], f"{result['steps']:,}", f"{result['training_seconds']:.0f} s"]
        before = result.get("calibration")
        row += ["-" if before is None else f"{before['calibration_seconds']:.0f} s"]
        for name in names:
            found = result["benches"].get(name)
            row += (
                ["-", "-"]
                if found is None or "accepted" not in found
                else [_shown(found["accepted"], "accept_length"), _equal(found["accepted"])]
            )
        alone = result["benches"].get(names[0], {}).get("alone")
        if alone is None:
            row += ["-"] * 4
        else:
            speed, gain = alone["tokens_per_second"]["value"], alone["speedup"]["value"]
            row += [number(speed / gain, 0), number(speed, 0), _shown(alone, "speedup", "x")]
            row.append(_shown(alone, "decode_speedup", "x"))
        rows.append(row)
    machines = list(dict.fromkeys(json.dumps(result["machine"]) for result in results))
    told = [", ".join(f"{name} {value}" for name, value in json.loads(machine).items()) for machine in machines]
    return [*("| " + " | ".join(row) + " |" for row in rows), "", f"Measured on: {'; '.join(told)}."]


def _equal(found: dict[str, Any]) -> str:
    return f"{percent(found['equal_prompts'])} / {percent(found['equal_at_width'])}"


def _shown(found: dict[str, Any], name: str, suffix: str = "") -> str:
    value = found[name]
    return "-" if value is None else estimate(Estimate(**value), 2, suffix)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
