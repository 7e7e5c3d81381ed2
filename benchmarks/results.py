"""Accept lengths of every method on one target, one data set and the same number of steps.

    python benchmarks/results.py --conversations answers.jsonl --prompts gsm8k.jsonl --out results

Captures the answers once, with the layout of the method that stores most, trains one draft per method from that store,
exports it and benches it on the first prompts. Prints one JSON line a method and writes them to OUT/results.jsonl; a
method that fails is reported and the others go on.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch

from draftsmith.bench.report import mean
from draftsmith.console import ConsoleProgress
from draftsmith.errors import DraftsmithError
from draftsmith.recipe import load_recipe
from draftsmith.workspace import Workspace

STORES_MOST = "smollm2-dspark"
# Recipes to compare, and what each needs for blocks of 16 beyond what all share.
METHODS = {
    "smollm2-dflash": ("draft.objective.weighting.gamma=7",),
    "smollm2-dpace": (),
    "smollm2-domino": ("draft.objective.weighting.gamma=7",),
    "smollm2-dspark": ("draft.objective.weighting.gamma=7",),
    "smollm2-dflash2": ("draft.objective.weighting.gamma=7",),
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
    "train.lr=6e-4",
    "train.num_anchors=128",
    "train.tokens_per_row=4800",
    "train.rows_per_step=1",
    "train.rows_per_forward=1",
    "train.eval_share=0.01",
    "train.data_workers=8",
    "export.which=last",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=Path, required=True, help="JSONL of the target's own answers")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of prompts to bench on")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs and results")
    parser.add_argument("--work", type=Path, default=None, help="directory of the feature store (default: OUT)")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="recipes to compare")
    parser.add_argument("--steps", type=int, default=1104)
    parser.add_argument("--limit", type=int, default=24, help="prompts to bench on")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument(
        "--captured", action="store_true", help="the store in WORK is there already: only train and bench"
    )
    parser.add_argument("overrides", nargs="*", help="further recipe overrides")
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    work = arguments.work or arguments.out
    target = None
    failed = False
    for number, method in enumerate(arguments.methods if arguments.captured else [None, *arguments.methods]):
        recipe_name = method or STORES_MOST
        overrides = [
            *SHARED,
            f"run={work / ('store' if method is None else recipe_name)}",
            f"data.conversations={arguments.conversations}",
            f"bench.prompts={arguments.prompts}",
            f"bench.limit={arguments.limit}",
            f"bench.max_new_tokens={arguments.max_new_tokens}",
            "bench.batch_size=24",
            "bench.warmup=0",
            f"train.max_steps={arguments.steps}",
            *METHODS.get(recipe_name, ()),
            *arguments.overrides,
        ]
        started = time.perf_counter()
        try:
            recipe = load_recipe(recipe_name, overrides)
            workspace = Workspace(recipe, progress=ConsoleProgress(), say=_say, redo=True)
            if target is not None:
                workspace.target = target
            if method is None:
                workspace.capture()
                target = workspace.target
                line = {"part": "capture", "seconds": round(time.perf_counter() - started, 1)}
            else:
                recipe.run.mkdir(parents=True, exist_ok=True)
                if not recipe.features.exists():
                    recipe.features.symlink_to((work / "store" / "features").resolve())
                line = _train_and_bench(workspace, method)
        except (DraftsmithError, RuntimeError, ValueError) as error:
            failed = True
            traceback.print_exc()
            line = {"part": recipe_name, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(line), flush=True)
        with open(arguments.out / "results.jsonl", "a" if number or arguments.captured else "w") as file:
            file.write(json.dumps(line) + "\n")
    return 1 if failed else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _train_and_bench(workspace: Workspace, method: str) -> dict[str, object]:
    recipe = workspace.recipe
    started = time.perf_counter()
    workspace.train()
    training = time.perf_counter() - started
    workspace.export()
    report = workspace.bench()
    lengths = [[float(length) for length in prompt.accept_lengths] for prompt in report.prompts]
    per_prompt = [sum(prompt) / len(prompt) for prompt in lengths if prompt]
    plain, speculative = report.plain, report.speculative
    return {
        "part": method,
        "steps": recipe.train.max_steps,
        "training_seconds": round(training, 1),
        "accept_length": mean([length for prompt in lengths for length in prompt]),
        "accept_length_mean_over_prompts": mean(per_prompt),
        "accept_length_first_six_prompts": mean(per_prompt[:6]),
        "plain_tokens_per_second": plain.tokens / plain.seconds,
        "speculative_tokens_per_second": speculative.tokens / speculative.seconds,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
