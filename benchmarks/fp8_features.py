"""Accept length of a draft trained on 8-bit features against one trained on bfloat16 features.

    python benchmarks/fp8_features.py --conversations answers.jsonl --prompts gsm8k.jsonl --out results

The same conversations are captured twice, with `capture.dtype` bfloat16 and fp8; two drafts are trained from these
stores with the same seed, order, steps and settings, exported, and benched on the first prompts. Prints one JSON line a
part and the ratio of the two accept lengths.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from draftsmith.bench.report import mean
from draftsmith.console import ConsoleProgress
from draftsmith.errors import DraftsmithError
from draftsmith.recipe import load_recipe
from draftsmith.workspace import Workspace

# What both runs share, whatever the CPU recipe says.
SHARED = (
    "target.dtype=bfloat16",
    "target.device=auto",
    "draft.dtype=bfloat16",
    "draft.num_taps=5",
    "draft.mask_token_id=16",
    "data.max_length=1024",
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
    "bench.batch_size=48",
    "bench.warmup=0",
)
DTYPES = ("bfloat16", "fp8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=Path, required=True, help="JSONL of the target's own answers")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of prompts to bench on")
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--work", type=Path, default=None, help="directory of the runs (default: OUT)")
    parser.add_argument("--recipe", default="smollm2-dflash")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=2, help="of the draft")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--limit", type=int, default=48, help="prompts to bench on")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("overrides", nargs="*", help="further recipe overrides")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    work = arguments.work or arguments.out
    target: Any = None
    lengths: dict[str, float] = {}
    for dtype in DTYPES:
        overrides = [
            *SHARED,
            f"run={work / dtype}",
            f"capture.dtype={dtype}",
            f"data.conversations={arguments.conversations}",
            f"draft.num_hidden_layers={arguments.layers}",
            f"draft.block_size={arguments.block_size}",
            f"train.max_steps={arguments.steps}",
            f"bench.prompts={arguments.prompts}",
            f"bench.limit={arguments.limit}",
            f"bench.max_new_tokens={arguments.max_new_tokens}",
            *arguments.overrides,
        ]
        try:
            workspace = Workspace(load_recipe(arguments.recipe, overrides), progress=ConsoleProgress(), say=_say, redo=True)
            if target is not None:
                workspace.target = target
            target = workspace.target
            line = _run(workspace, dtype)
            lengths[dtype] = float(str(line["accept_length"]))
        except (DraftsmithError, RuntimeError, ValueError) as error:
            traceback.print_exc()
            line = {"dtype": dtype, "error": f"{type(error).__name__}: {error}"}
        _write(arguments.out, line)
    if len(lengths) < len(DTYPES):
        return 1
    _write(arguments.out, {"fp8_over_bfloat16": round(lengths["fp8"] / lengths["bfloat16"], 4)})
    return 0


def _run(workspace: Workspace, dtype: str) -> dict[str, object]:
    seconds: dict[str, float] = {}
    for name, stage in (
        ("capture", workspace.capture),
        ("train", workspace.train),
        ("export", workspace.export),
    ):
        start = time.perf_counter()
        stage()
        seconds[name] = round(time.perf_counter() - start, 1)
    start = time.perf_counter()
    report = workspace.bench()
    seconds["bench"] = round(time.perf_counter() - start, 1)
    lengths = [[float(length) for length in prompt.accept_lengths] for prompt in report.prompts]
    store = sum(path.stat().st_size for path in workspace.recipe.features.iterdir())
    return {
        "dtype": dtype,
        "accept_length": mean([length for prompt in lengths for length in prompt]),
        "accept_length_mean_over_prompts": mean([sum(prompt) / len(prompt) for prompt in lengths if prompt]),
        "verifies": sum(map(len, lengths)),
        "prompts": len(lengths),
        "steps": workspace.recipe.train.max_steps,
        "store_bytes": store,
        "seconds": seconds,
    }


def _write(out: Path, line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)
    with (out / "fp8_features.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
