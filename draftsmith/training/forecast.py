"""What a training will take, as far as that is known before it: steps, memory, time."""

import json
from pathlib import Path

import torch

from draftsmith.algorithms.registry import algorithm
from draftsmith.base.devices import parse_device, resolve_device
from draftsmith.base.readable import readable_bytes, readable_duration
from draftsmith.drafts.draft import Draft
from draftsmith.targets.info import TargetInfo
from draftsmith.training.options import TrainOptions
from draftsmith.training.source import FeatureSource
from draftsmith.training.start import Start
from draftsmith.training.steps import Steps, plan_steps
from draftsmith.training.tracking import METRICS_FILE

# fp32: the weight, its gradient, and AdamW's two moments.
_BYTES_A_PARAMETER = 16


def forecast(start: Start, target: TargetInfo, source: FeatureSource | None, options: TrainOptions) -> list[str]:
    """Lines for people about the run that begins at `start`; source None: there are no features yet.

    Raises `DraftsmithError` as `plan_steps`.
    """
    steps = None if source is None else plan_steps(source, options)
    done = 0 if start.latest is None else start.latest.position.step
    return [
        f"steps: {_steps(source, steps, options)}" + (f", of which {done:,} are done" if done else ""),
        f"memory of each process: {_memory(start, target, options)}",
        f"time: {_time(start.run_dir, source, steps, done)}",
    ]


def _steps(source: FeatureSource | None, steps: Steps | None, options: TrainOptions) -> str:
    if source is None or steps is None:
        if options.max_steps is not None:
            return f"{options.max_steps:,} (train.max_steps); how many documents is known once there are features"
        return f"known once there are features: {options.epochs:,} passes over them (train.epochs)"
    tokens = sum(source.lengths[document] for document in steps.documents)
    passes = steps.total / steps.plan.steps_in(0)
    return (
        f"{steps.total:,}, which is {passes:.3g} passes over {len(steps.documents):,} documents with {tokens:,} tokens "
        f"in {len(steps.plan.rows(0)):,} rows of {options.tokens_per_row:,}; {len(steps.held_out):,} documents held out"
    )


def _memory(start: Start, target: TargetInfo, options: TrainOptions) -> str:
    config = start.config
    # A plan may be made elsewhere than on the machine with the device.
    device = parse_device(options.device, "train.device") or resolve_device("auto")
    bf16 = options.precision == "bf16" or (options.precision == "auto" and device.type == "cuda")
    with torch.device("meta"):
        linear, others = 0, 0
        for module in Draft(config).modules():
            size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            if isinstance(module, torch.nn.Linear):
                linear += size
            else:
                others += size
    weights = _BYTES_A_PARAMETER * (linear + others) + (2 * linear if bf16 else 0)
    ends = (1 if target.tied else 2) * target.vocab_size * target.hidden_size
    ends *= target.loaded_dtype().itemsize if bf16 else 4
    layout = algorithm(start.section.algorithm).capture(config)
    tokens = options.rows_per_forward * options.tokens_per_row
    features = tokens * sum(layout.widths.values()) * (2 if bf16 else 4)
    parts = {
        "weights, gradients and AdamW's moments": weights,
        "the target's embedding and output head": ends,
        f"features of a forward of {tokens:,} tokens": features,
    }
    shared = " (the first is divided among the processes)" if options.parallel == "fsdp" else ""
    listed = ", ".join(f"{readable_bytes(size)} {name}" for name, size in parts.items())
    return (
        f"{readable_bytes(sum(parts.values()))} on {device.type} ({listed}){shared}; activations and logits come on top"
    )


def _time(run_dir: Path, source: FeatureSource | None, steps: Steps | None, done: int) -> str:
    speed = _tokens_per_second(run_dir / METRICS_FILE) if done else None
    if speed is None or source is None or steps is None:
        return "known after the first steps, whose progress shows what is left"
    tokens = sum(source.lengths[document] for document in steps.documents)
    left = tokens * (steps.total - done) / steps.plan.steps_in(0)
    return f"{readable_duration(left / speed)} for the steps left, at the run's last {speed:,.0f} tokens/s"


def _tokens_per_second(metrics: Path) -> float | None:
    """The speed in the last log entry of a run; None where there is none."""
    if not metrics.is_file():
        return None
    for line in reversed(metrics.read_text(encoding="utf-8").splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # torn by an interruption
        if isinstance(entry, dict) and entry.get("kind") == "train" and entry.get("tokens_per_second"):
            return float(entry["tokens_per_second"])
    return None
