"""Accept length of drafts trained on 8-bit features against drafts trained on bfloat16 features.

    python benchmarks/fp8_features.py --conversations answers.jsonl --prompts gsm8k.jsonl --out results

The same conversations are captured twice, with `capture.dtype` bfloat16 and fp8. For every seed two drafts are trained
from these stores with the same order, anchors, steps and settings, exported, and decode the first prompts. Every draft
is trained and run in a process of its own, `--together` of them at a time: nothing here is a time. Prints one JSON line
a draft, then the ratio of the accept lengths for each seed and for all seeds together, each with a 95 % interval over
the prompts, and the same ratio of drafts of different seeds and equal features, which is what chance alone does.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.bench.intervals import jackknife
from draftsmith.blocks.accept import counted_verifies
from draftsmith.cli.console import ConsoleProgress
from draftsmith.data.chat import render_prompt
from draftsmith.data.prompts import read_prompts
from draftsmith.decoding.generate import generate
from draftsmith.run.recipe import load_recipe
from draftsmith.stages.workspace import Workspace
from draftsmith.targets.target import Target

# What all runs share, whatever the CPU recipe says.
SHARED = (
    "target.dtype=bfloat16",
    "target.device=auto",
    "draft.dtype=bfloat16",
    "draft.num_taps=5",
    "draft.mask_token_id=16",
    "data.max_length=1024",
    "capture.tokens_per_batch=65536",
    "train.precision=bf16",
    "train.lr=1e-3",
    "train.num_anchors=40",
    "train.tokens_per_row=4800",
    "train.rows_per_step=1",
    "train.rows_per_forward=1",
    "train.eval_share=0.01",
    "train.data_workers=3",
    "export.which=last",
)
DTYPES = ("bfloat16", "fp8")


def main() -> int:
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.part is not None:
        dtype, seed = arguments.part
        _write(arguments.out, _train(arguments, dtype, int(seed)), _name(dtype, int(seed)))
        return 0
    target: Target | None = None
    for dtype in DTYPES:
        start = time.perf_counter()
        workspace = _workspace(arguments, dtype)
        if target is not None:
            workspace.target = target
        target = workspace.target
        workspace.capture()
        files = list(workspace.recipe.features.iterdir())
        line = {"store": dtype, "bytes": sum(path.stat().st_size for path in files)}
        _write(arguments.out, line | {"seconds": round(time.perf_counter() - start, 1)}, f"store-{dtype}")
    parts = [(dtype, seed) for seed in arguments.seeds for dtype in DTYPES]
    for part in parts:
        _path(arguments.out, _name(*part)).unlink(missing_ok=True)  # of an earlier call
    with ThreadPoolExecutor(arguments.together) as pool:
        failed = any(pool.map(partial(_start, arguments), parts))
    return int(_compare(arguments.out, arguments.seeds) or failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=Path, required=True, help="JSONL of the target's own answers")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of prompts to answer")
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--work", type=Path, default=None, help="directory of stores and runs (default: OUT)")
    parser.add_argument("--recipe", default="smollm2-dflash")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--together", type=int, default=1, help="drafts that are trained at a time")
    parser.add_argument("--layers", type=int, default=2, help="of the draft")
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--limit", type=int, default=256, help="prompts to answer")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--part", nargs=2, metavar=("DTYPE", "SEED"), help="train and run this draft only")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="a further recipe override")
    return parser.parse_args()


def _workspace(arguments: argparse.Namespace, dtype: str, seed: int | None = None) -> Workspace:
    """The run of one store (seed None), or of one draft, which reads that store through a link."""
    work: Path = (arguments.work or arguments.out).absolute()
    run = work / dtype if seed is None else work / _name(dtype, seed)
    if seed is not None:
        run.mkdir(parents=True, exist_ok=True)
        (run / "features").unlink(missing_ok=True)
        (run / "features").symlink_to(work / dtype / "features")
    overrides = [
        *SHARED,
        f"run={run}",
        f"capture.dtype={dtype}",
        f"data.conversations={arguments.conversations}",
        f"draft.num_hidden_layers={arguments.layers}",
        f"draft.block_size={arguments.block_size}",
        f"train.max_steps={arguments.steps}",
        f"train.seed={seed or 0}",
        *arguments.overrides,
    ]
    return Workspace(load_recipe(arguments.recipe, overrides), progress=ConsoleProgress(), say=_say, redo=True)


def _start(arguments: argparse.Namespace, part: tuple[str, int]) -> bool:
    """One draft in a process of its own, with its words in a file; whether it failed."""
    dtype, seed = part
    log = arguments.out / f"{_name(dtype, seed)}.log"
    with log.open("w") as file:
        command = [sys.executable, *sys.argv, "--part", dtype, str(seed)]
        done = subprocess.run(command, check=False, stdout=file, stderr=file)
    if done.returncode != 0:
        print(f"{log}: rc {done.returncode}\n{log.read_text()[-3000:]}", flush=True)
        return True
    print(json.dumps({name: value for name, value in _read(arguments.out, *part).items() if name != "by_prompt"}))
    sys.stdout.flush()
    return False


def _train(arguments: argparse.Namespace, dtype: str, seed: int) -> dict[str, Any]:
    workspace = _workspace(arguments, dtype, seed)
    seconds: dict[str, float] = {}
    for name, stage in (("train", workspace.train), ("export", workspace.export)):
        start = time.perf_counter()
        stage()
        seconds[name] = round(time.perf_counter() - start, 1)
    start = time.perf_counter()
    target, data = workspace.target, workspace.recipe.data
    generations = generate(
        target,
        workspace.load_draft(None),
        [
            render_prompt([{"role": "user", "content": prompt.turns[0]}], target.tokenizer, data)
            for prompt in read_prompts(str(arguments.prompts))[: arguments.limit]
        ],
        max_new_tokens=arguments.max_new_tokens,
        stop_token_ids=workspace.stop_ids,
    )
    seconds["generate"] = round(time.perf_counter() - start, 1)
    lengths = [counted_verifies(one.accept_lengths, one.finish_reason) for one in generations]
    by_prompt = [[sum(one), len(one)] for one in lengths]
    tokens, verifies = np.sum(by_prompt, axis=0).tolist()
    return {
        "draft": dtype,
        "seed": seed,
        "accept_length": round(tokens / verifies, 4),
        "verifies": verifies,
        "prompts": len(lengths),
        "steps": workspace.recipe.train.max_steps,
        "seconds": seconds,
        "by_prompt": by_prompt,
    }


def _compare(out: Path, seeds: Sequence[int]) -> bool:
    """Write the ratios of what there is; whether some are missing."""
    parts = {
        (dtype, seed): np.array(_read(out, dtype, seed)["by_prompt"], dtype=np.float64)
        for dtype, seed in product(DTYPES, seeds)
        if _path(out, _name(dtype, seed)).exists()
    }
    whole = [seed for seed in seeds if all((dtype, seed) in parts for dtype in DTYPES)]
    lines = [
        {"fp8_over_bfloat16": "seed", "seed": seed} | _ratio([parts["fp8", seed]], [parts["bfloat16", seed]])
        for seed in whole
    ]
    if len(whole) > 1:
        eights, sixteens = ([parts[dtype, seed] for seed in whole] for dtype in ("fp8", "bfloat16"))
        lines.append({"fp8_over_bfloat16": "all", "seeds": whole} | _ratio(eights, sixteens))
    lines += [
        {"equal_features": dtype, "seeds": [one, two]} | _ratio([parts[dtype, two]], [parts[dtype, one]])
        for dtype, (one, two) in product(DTYPES, combinations(whole, 2))
    ]
    _write(out, {"ratios": lines}, "ratios")
    return len(whole) < len(seeds)


def _ratio(above: Sequence[np.ndarray], below: Sequence[np.ndarray]) -> dict[str, Any]:
    """The mean accept length of drafts over that of others; each array [prompts, 2]: tokens, verifies.

    The interval is over prompts: a prompt is left out of all drafts at once.
    """

    def figure(sums: np.ndarray) -> np.ndarray:
        lengths = sums[:, 0::2] / sums[:, 1::2]  # [n, drafts]
        return lengths[:, : len(above)].mean(1) / lengths[:, len(above) :].mean(1)

    estimate = jackknife(np.concatenate([*above, *below], axis=1).tolist(), figure)
    return {} if estimate is None else {name: value and round(value, 4) for name, value in estimate}


def _name(dtype: str, seed: int) -> str:
    return f"{dtype}-{seed}"


def _path(out: Path, name: str) -> Path:
    return out / f"{name}.json"


def _read(out: Path, dtype: str, seed: int) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(_path(out, _name(dtype, seed)).read_text())
    return line


def _write(out: Path, line: dict[str, Any], name: str) -> None:
    _path(out, name).write_text(json.dumps(line) + "\n")
    if "by_prompt" not in line:
        print(json.dumps(line), flush=True)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
