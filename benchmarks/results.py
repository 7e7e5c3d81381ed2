"""Accept length and speed of every method after the same time of training: the table of `docs/results.md`.

    python benchmarks/results.py all --conversations answers.jsonl --prompts gsm8k=gsm8k.jsonl \
        --prompts mt-bench=mt-bench.jsonl
    python benchmarks/results.py method dspark ...    # one method, where the time on a machine is short
    python benchmarks/results.py table                # what all calls so far add up to

Captures the answers once, with the layout of the method that stores most, and trains each method's draft from that
store for `--seconds` of wall time, its start included: a short run says how many steps those are, so that the learning
rate falls to its end within them. The last checkpoint is exported and benched: accept lengths on all prompts in large
batches, speeds one row at a time on the first of them. Each method leaves OUT/METHOD.json; `table` writes them into the
page between its two markers. A method that fails is reported, and the others go on.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers

from draftsmith.bench.chat import Chat
from draftsmith.bench.decoders import DraftEntry
from draftsmith.bench.figures import Figures, figures
from draftsmith.bench.headline import estimate, number, percent
from draftsmith.bench.intervals import Estimate
from draftsmith.bench.measure import bench, write_report
from draftsmith.bench.options import BenchOptions
from draftsmith.console import ConsoleProgress
from draftsmith.data.prompts import find_prompts
from draftsmith.errors import DraftsmithError
from draftsmith.recipe import Recipe, load_recipe
from draftsmith.workspace import Workspace

STORES_MOST = "dspark"
GAMMA = "draft.objective.weighting.gamma=7"
# Methods by the recipe `smollm2-METHOD`, and what each needs for blocks of 16 beyond what all share.
METHODS = {"dflash": (GAMMA,), "dpace": (), "domino": (GAMMA,), "dspark": (GAMMA,), "dflash2": (GAMMA,)}
TITLES = {
    "dflash": "DFlash",
    "dpace": "DFlash with D-PACE",
    "domino": "Domino",
    "dspark": "DSpark",
    "dflash2": "DFlash 2",
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
    "train.lr=6e-4",
    "train.num_anchors=128",
    "train.tokens_per_row=4800",
    "train.rows_per_step=1",
    "train.rows_per_forward=1",
    "train.eval_share=0.01",
    "train.data_workers=8",
    "export.which=last",
)
CALIBRATION_STEPS = 80
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def main() -> int:
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.command == "table":
        write_table(arguments)
        return 0
    wanted = list(METHODS) if arguments.command == "all" else [arguments.method]
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
    one = commands.add_parser("method", help="capture if that is not done, and one method")
    one.add_argument("method", choices=list(METHODS))
    table = commands.add_parser("table", help="the table of what is there")
    for command in (everything, one):
        command.add_argument("--conversations", type=Path, required=True, help="JSONL of the target's own answers")
        command.add_argument(
            "--prompts", action="append", required=True, help="NAME=SOURCE: prompts to bench on, as for bench.prompts"
        )
        command.add_argument("--work", type=Path, default=None, help="directory of store and runs (default: OUT)")
        command.add_argument("--seconds", type=float, default=170.0, help="wall time of each training")
        command.add_argument("--steps", type=int, default=None, help="steps of each training, in place of --seconds")
        command.add_argument("--limit", default="gsm8k=200,mt-bench=80", help="NAME=N,...: the first N prompts")
        command.add_argument("--max-new-tokens", type=int, default=256)
        command.add_argument("--batch-size", type=int, default=32, help="of the bench of accept lengths")
        command.add_argument("--speed-prompts", type=int, default=24, help="prompts of the bench at batch size 1")
        command.add_argument("--set", action="append", default=[], dest="overrides", help="a further recipe override")
    for command in (everything, one, table):
        command.add_argument("--out", type=Path, default=Path("runs/results"), help="directory of the results")
        command.add_argument("--page", type=Path, default=Path("docs/results.md"), help="the page to write into")
    return parser.parse_args()


# --- the work ---------------------------------------------------------------------------------------------------------


def _workspace(method: str, arguments: argparse.Namespace, run: str, *further: str) -> Workspace:
    work = arguments.work or arguments.out
    overrides = [f"run={work / run}", f"data.conversations={arguments.conversations}"]
    recipe = load_recipe(f"smollm2-{method}", [*SHARED, *METHODS[method], *overrides, *arguments.overrides, *further])
    return Workspace(recipe, progress=ConsoleProgress(), say=_say, redo=True)


def _capture(arguments: argparse.Namespace) -> dict[str, object]:
    started = time.perf_counter()
    workspace = _workspace(STORES_MOST, arguments, "store")
    workspace.capture()
    return {"part": "capture", "seconds": round(time.perf_counter() - started, 1)}


def _method(method: str, arguments: argparse.Namespace) -> dict[str, object]:
    store = (arguments.work or arguments.out) / "store" / "features"
    steps = arguments.steps
    if steps is None:
        steps = _steps_within(arguments.seconds, _linked(_calibration(method, arguments), store))
    workspace = _linked(_workspace(method, arguments, method, f"train.max_steps={steps}"), store)
    seconds = _train(workspace)
    workspace.export()
    workspace.load_draft(None)  # loads the target too, before anything is timed
    line: dict[str, object] = {"part": method, "steps": steps, "training_seconds": round(seconds, 1)}
    line |= {"evaluation": _last_evaluation(workspace.recipe), "machine": _machine(), "benches": {}}
    limits = {name: int(count) for name, _, count in (part.partition("=") for part in arguments.limit.split(","))}
    benches: dict[str, Any] = {}
    for named in arguments.prompts:
        name, _, source = named.partition("=")
        accepted = _bench(workspace, method, arguments, name, source, limits.get(name), arguments.batch_size)
        alone = _bench(workspace, method, arguments, name, source, arguments.speed_prompts, 1)
        benches[name] = {"accepted": accepted.to_json(), "alone": alone.to_json()}
    line["benches"] = benches
    (arguments.out / f"{method}.json").write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
    return line


def _calibration(method: str, arguments: argparse.Namespace) -> Workspace:
    short = (f"train.max_steps={CALIBRATION_STEPS}", "train.eval_share=0", f"track.every={CALIBRATION_STEPS // 4}")
    return _workspace(method, arguments, f"{method}-calibration", *short)


def _steps_within(seconds: float, workspace: Workspace) -> int:
    """How many steps a training of so many seconds has, from a short one: its start, and the rate at its end."""
    whole = _train(workspace)
    entries = [json.loads(line) for line in (workspace.recipe.training / "metrics.jsonl").read_text().splitlines()]
    rate = entries[-1]["tokens_per_second"]
    step = 0.97 * workspace.recipe.train.tokens_per_row * workspace.recipe.train.rows_per_step / rate
    start = max(0.0, whole - CALIBRATION_STEPS * step)
    _say(f"calibration: {1 / step:.2f} steps/s, {start:.1f} s to start")
    return max(1, int((seconds - start) / step))


def _train(workspace: Workspace) -> float:
    started = time.perf_counter()
    workspace.train()
    return time.perf_counter() - started


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
        engine=recipe.bench.engine,
    )
    report = bench(
        target,
        [DraftEntry(method, workspace.load_draft(None), recipe.draft_directory)],
        find_prompts(source, "heldout")[:limit],
        options,
        Chat(target.tokenizer, recipe.data),
        stop_token_ids=workspace.stop_ids,
        progress=ConsoleProgress(),
    )
    stem = arguments.out / f"{method}-{name}-batch-{batch_size}"
    write_report(report, *(stem.with_name(f"{stem.name}.{kind}") for kind in ("json", "jsonl", "html")))
    return figures(report, report.drafts[0], batch_size)


def _last_evaluation(recipe: Recipe) -> dict[str, float]:
    entries = [json.loads(line) for line in (recipe.training / "metrics.jsonl").read_text().splitlines()]
    found = [entry for entry in entries if entry["kind"] == "eval"]
    return {name: value for name, value in found[-1].items() if isinstance(value, float)} if found else {}


def _machine() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


# --- the table --------------------------------------------------------------------------------------------------------


def write_table(arguments: argparse.Namespace) -> None:
    """Prints the table of all methods that have results, and puts it into the page."""
    found = [arguments.out / f"{method}.json" for method in METHODS]
    lines = [json.loads(path.read_text(encoding="utf-8")) for path in found if path.is_file()]
    if not lines:
        raise SystemExit(f"there are no results in {arguments.out}; run `all` or `method` first")
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
    header = ["method", "steps", "training"]
    for name in names:
        header += [f"{name}: accept length (95 %)", f"{name}: equal tokens"]
    header += [f"{names[0]}, batch 1: plain tokens/s", "speculative tokens/s", "speed-up (95 %)"]
    rows = [header, ["---"] * len(header)]
    for result in results:
        row = [TITLES[result["part"]], f"{result['steps']:,}", f"{result['training_seconds']:.0f} s"]
        for name in names:
            found = result["benches"].get(name)
            row += (
                ["-", "-"]
                if found is None
                else [_shown(found["accepted"], "accept_length"), percent(found["accepted"]["equal_share"])]
            )
        alone = result["benches"][names[0]]["alone"]
        speed, gain = alone["decode_tokens_per_second"]["value"], alone["decode_speedup"]["value"]
        row += [number(speed / gain, 0), number(speed, 0), _shown(alone, "decode_speedup", "x")]
        rows.append(row)
    machines = list(dict.fromkeys(json.dumps(result["machine"]) for result in results))
    told = [", ".join(f"{name} {value}" for name, value in json.loads(machine).items()) for machine in machines]
    return [*("| " + " | ".join(row) + " |" for row in rows), "", f"Measured on: {'; '.join(told)}."]


def _shown(found: dict[str, Any], name: str, suffix: str = "") -> str:
    value = found[name]
    return "-" if value is None else estimate(Estimate(**value), 2, suffix)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
