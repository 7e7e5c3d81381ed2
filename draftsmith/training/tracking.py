"""Where the numbers of a run go: the console, `metrics.jsonl`, and the trackers that Accelerate knows."""

import json
import logging
import resource
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_tensorboard_available, is_trackio_available, is_wandb_available
from rich.console import Console

from draftsmith.base.files import replacing
from draftsmith.errors import DraftsmithError
from draftsmith.training.options import TrackOptions

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"

_AVAILABLE = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available, "trackio": is_trackio_available}

Values = Mapping[str, float | list[float | None] | None]


def wanted_trackers(options: TrackOptions) -> list[str]:
    """The external trackers switched on; one that is not installed is an error rather than silence."""
    wanted = [name for name in _AVAILABLE if getattr(options, name)]
    for name in wanted:
        if not _AVAILABLE[name]():
            raise DraftsmithError(
                f"track.{name} is on but {name} is not installed; pip install {name}, or switch it off"
            )
    return wanted


def new_tracker_ids(options: TrackOptions) -> dict[str, str]:
    """Fresh run ids for the trackers that can go on with a run of theirs when training resumes."""
    return {name: uuid.uuid4().hex[:12] for name in ("wandb", "trackio") if getattr(options, name)}


class RunLog:
    """Writes one entry per call of `log` to everything that `options` switches on; on the main process only.

    A resumed run passes `resumed_at`, the step it continues from: entries of later steps, which a killed process wrote
    and which are about to be written again, are dropped.
    """

    def __init__(
        self,
        run_dir: Path,
        options: TrackOptions,
        accelerator: Accelerator,
        *,
        config: dict[str, Any],
        tracker_ids: dict[str, str],
        resumed_at: int | None,
        console: Console | None = None,
    ) -> None:
        self.options = options
        self.accelerator = accelerator
        self.console = console or Console()
        self._metrics = run_dir / METRICS_FILE
        if not accelerator.is_main_process:
            return
        if options.jsonl:
            _keep_until(self._metrics, resumed_at)
        name = options.run_name or run_dir.resolve().name
        accelerator.init_trackers(
            options.project,
            init_kwargs={
                "tensorboard": {} if resumed_at is None else {"purge_step": resumed_at + 1},
                "wandb": {"name": name, "id": tracker_ids.get("wandb"), "resume": "allow", "config": config},
                "trackio": {"name": f"{name}-{tracker_ids.get('trackio')}", "resume": "allow", "config": config},
            },
        )

    def log(self, kind: str, step: int, values: Values) -> None:
        """One entry of `kind` ("train" or "eval") for the state after `step` steps; lists hold one number per label."""
        if not self.accelerator.is_main_process:
            return
        if self.options.jsonl:
            try:
                with self._metrics.open("a") as file:
                    file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            except OSError as error:
                raise DraftsmithError(
                    f"the numbers of step {step} cannot be written to {self._metrics} ({error}); make room, and run "
                    "again with --resume to go on from the last checkpoint"
                ) from error
        if self.options.console:
            self.console.print(_line(kind, step, values), soft_wrap=True, highlight=False, markup=False)
        self.accelerator.log(_scalars(kind, values), step=step)

    def close(self) -> None:
        """Finish the trackers' runs. The process group stays: another run of the same processes may follow."""
        if self.accelerator.is_main_process:
            for tracker in self.accelerator.trackers:
                tracker.finish()


def memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: on the GPU if it trains there, otherwise resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _keep_until(path: Path, resumed_at: int | None) -> None:
    """Drop what belongs to steps after `resumed_at` (None: to any), a torn last line, and, with a warning, what cannot
    be read."""
    kept = []
    if resumed_at is not None and path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        steps = [_step_of(line) for line in lines]
        kept = [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= resumed_at]
        if None in steps:
            _log.warning("%s: dropped %d lines that cannot be read", path, steps.count(None))
    with replacing(path) as file:
        file.write("".join(line + "\n" for line in kept).encode())


def _step_of(line: str) -> int | None:
    """The step of a log entry; None for a line that is none."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    step = entry.get("step") if isinstance(entry, dict) else None
    return step if isinstance(step, int) else None


def _scalars(kind: str, values: Values) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            flat |= {f"{kind}/{name}/label_{i + 1}": entry for i, entry in enumerate(value) if entry is not None}
        elif value is not None:
            flat[f"{kind}/{name}"] = value
    return flat


_FORMATS = {"lr": "{:.2e}", "tokens_per_second": "{:,.0f}", "data_wait": "{:.0%}", "memory_gib": "{:.2f}"}


def _line(kind: str, step: int, values: Values) -> str:
    """`eval  step 40  loss 2.1  accuracy 0.61 0.43 0.30`"""
    shown = [f"{name} {_text(name, value)}" for name, value in values.items()]
    return "  ".join([f"{kind:5}", f"step {step}", *shown])


def _text(name: str, value: float | list[float | None] | None) -> str:
    if isinstance(value, list):
        return " ".join("-" if entry is None else f"{entry:.2f}" for entry in value)
    return "-" if value is None else _FORMATS.get(name, "{:.4g}").format(value)
