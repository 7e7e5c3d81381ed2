"""Accept length of a draft trained on 8-bit features against one trained on bfloat16 features.

    python benchmarks/fp8_features.py --conversations answers.jsonl --prompts gsm8k.jsonl --out results

The same conversations are captured twice, with `capture.dtype` bfloat16 and fp8; two drafts are trained from these
stores with the same seed, order, steps and settings, exported, and decode the first prompts. Prints one JSON line a
part and the ratio of the two accept lengths.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from draftsmith.blocks.accept import counted_verifies
from draftsmith.console import ConsoleProgress
from draftsmith.data.chat import render_prompt
from draftsmith.data.prompts import Prompt, read_prompts
from draftsmith.decoding.generate import generate
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
)
DTYPES = ("bfloat16", "fp8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=Path, required=True, help="JSONL of the target's own answers")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of prompts to answer")
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--work", type=Path, default=None, help="directory of the runs (default: OUT)")
    parser.add_argument("--recipe", default="smollm2-dflash")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=2, help="of the draft")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--limit", type=int, default=48, help="prompts to answer")
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
            *arguments.overrides,
        ]
        try:
            workspace = Workspace(
                load_recipe(arguments.recipe, overrides), progress=ConsoleProgress(), say=_say, redo=True
            )
            if target is not None:
                workspace.target = target
            target = workspace.target
            line = _run(
                workspace, dtype, read_prompts(str(arguments.prompts))[: arguments.limit], arguments.max_new_tokens
            )
            lengths[dtype] = float(str(line["accept_length"]))
        except (DraftsmithError, RuntimeError, ValueError) as error:
            traceback.print_exc()
            line = {"dtype": dtype, "error": f"{type(error).__name__}: {error}"}
        _write(arguments.out, line)
    if len(lengths) < len(DTYPES):
        return 1
    _write(arguments.out, {"fp8_over_bfloat16": round(lengths["fp8"] / lengths["bfloat16"], 4)})
    return 0


def _run(workspace: Workspace, dtype: str, prompts: list[Prompt], max_new_tokens: int) -> dict[str, object]:
    seconds: dict[str, float] = {}
    for name, stage in (("capture", workspace.capture), ("train", workspace.train), ("export", workspace.export)):
        start = time.perf_counter()
        stage()
        seconds[name] = round(time.perf_counter() - start, 1)
    start = time.perf_counter()
    target, recipe = workspace.target, workspace.recipe
    generations = generate(
        target,
        workspace.load_draft(None),
        [render_prompt([{"role": "user", "content": p.turns[0]}], target.tokenizer, recipe.data) for p in prompts],
        max_new_tokens=max_new_tokens,
        stop_token_ids=workspace.stop_ids,
    )
    seconds["generate"] = round(time.perf_counter() - start, 1)
    lengths = [counted_verifies(one.accept_lengths, one.finish_reason) for one in generations]
    verifies = [length for one in lengths for length in one]
    return {
        "dtype": dtype,
        "accept_length": sum(verifies) / len(verifies),
        "verifies": len(verifies),
        "prompts": len(lengths),
        "steps": recipe.train.max_steps,
        "store_bytes": sum(path.stat().st_size for path in recipe.features.iterdir()),
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
