"""Training, capture and rollouts by several processes against one: losses, tokens/s, checkpoints, records, tokens.

    python benchmarks/two_gpus.py --into /dev/shm/two train:smollm2:dflash capture
    torchrun --standalone --nproc-per-node 2 benchmarks/two_gpus.py --into /dev/shm/two \\
        train:smollm2:dflash train:smollm2:dflash:fsdp capture rollout:domino

One process comes first: what it leaves in the directory is what several are compared with. `resume` trains on from
where its run stands and stops after 7 steps, so that three calls in turn, by whatever processes, make a whole run, of
20 steps; the last one is compared with `train`'s. `rollout` needs no call before it. Parts:

    train:SHAPE:METHOD[:fsdp]     20 steps on random features: loss of every 5 steps, tokens/s of each process
    resume:SHAPE:METHOD[:fsdp]    8 steps more of one run
    warm:SHAPE:METHOD[:fsdp]      2 steps, so that what follows in this call finds the shape compiled
    capture                       a target of random weights over random documents: records and tokens/s; at least four
                                  of `--documents` a process
    rollout:METHOD[:fp32]         domino's or dspark's blocks and the engine's answers, with a shared vocabulary
    profile:SHAPE:METHOD[:fsdp]   8 steps of training, of which 4 are profiled: the kernels that take longest
    wait:NAME                     until a file of this name stands in the directory; a part that is done leaves one,
                                  done-train-smollm2-dflash-2 for one of two processes

SHAPE is smollm2 or qwen3-8b, METHOD a method's name. A step has the same `--rows` rows however many processes share
them. `train` writes no checkpoint, which `resume` does. `--tiny` shrinks every size, so that all of it runs on a CPU
(gloo). Prints one JSON line a part; a failure ends the call, since the other processes would wait for the one that
failed.
"""

import argparse
import fcntl
import gc
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import PartialState
from device_timing import kernel_table
from two_gpus_capture import capture_part
from two_gpus_rollouts import rollout_part
from two_gpus_shapes import COUNT, RANK, Call, draft_section, first_alone, target_of

from draftsmith.base.progress import Stage
from draftsmith.drafts.draft import Draft
from draftsmith.features.identity import target_identity
from draftsmith.features.manifest import StoreHeader
from draftsmith.features.reader import Store
from draftsmith.features.record import Record
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import StoreWriter, finish_store
from draftsmith.parallel.ranks import local_rank
from draftsmith.targets.ends import TargetEnds, TargetOutline
from draftsmith.targets.info import TargetInfo
from draftsmith.training.loop import Loop
from draftsmith.training.options import TrackOptions, TrainOptions
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource

STEPS, WINDOW = 20, 5
STOP_AFTER = 7  # the step that runs when the signal comes is the last one


# --- training -------------------------------------------------------------------------------------------------------


def feature_store(call: Call, name: str, info: TargetInfo, ends: TargetEnds) -> Store:
    """Random features of two steps' documents, as the method that reads most of them needs; written once, also where
    several calls want them at a time."""
    call.into.mkdir(parents=True, exist_ok=True)
    with (call.into / f"features-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _feature_store(call, name, info, ends)


def _feature_store(call: Call, name: str, info: TargetInfo, ends: TargetEnds) -> Store:
    shape, directory = call.shape(name), call.into / f"features-{name}"
    if (directory / "manifest.json").exists():
        return Store.open(directory)
    layout = CaptureLayout(shape.taps, shape.hidden, final_state=True)
    identity = target_identity("random", None, info.text_config, ends.head_weight)
    with StoreWriter(directory, StoreHeader.for_layout(layout, identity, None)) as writer:
        for number in range(2 * call.rows * shape.documents):
            generator = torch.Generator(call.device).manual_seed(number)
            features = {
                feature: torch.empty(shape.tokens, width, device=call.device, dtype=torch.bfloat16)
                .normal_(generator=generator)
                .cpu()
                for feature, width in layout.widths.items()
            }
            ids = torch.randint(shape.vocabulary - 1, (shape.tokens,), generator=torch.Generator().manual_seed(number))
            writer.add(Record(f"document-{number:04d}", ids, torch.ones(shape.tokens, dtype=torch.bool), features))
    finish_store(directory)
    return Store.open(directory)


class StopAfter:
    """A progress that asks for the end of the run, as an operator would, once it has gone so many steps further."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.reports = -1  # the first report is of where the run starts

    @contextmanager
    def stage(self, name: str, total: float | None, unit: str) -> Iterator[Stage]:
        yield self

    def advance(self, amount: float = 1.0, **fields: str) -> None:
        self.reports += 1
        if self.reports == self.steps:
            os.kill(os.getpid(), signal.SIGTERM)


class Profiled(StopAfter):
    """Profiles the last `steps` steps before it asks for the end; `table` has the kernels of the longest times."""

    def __init__(self, before: int, steps: int) -> None:
        super().__init__(before + steps)
        self.before, self.table = before, ""

    def advance(self, amount: float = 1.0, **fields: str) -> None:
        super().advance(amount, **fields)
        if self.reports == self.before:
            torch.cuda.synchronize()
            self.trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.trace.start()
        if self.reports == self.steps:
            torch.cuda.synchronize()
            self.trace.stop()
            self.table = kernel_table(self.trace, self.steps - self.before, 18)


def drawn_on(device: str) -> Any:
    """Has `Draft.from_config` draw weights where they are trained: a billion take one core 6 s."""
    empty = Draft.to_empty
    return patch.object(Draft, "to_empty", lambda draft, **_: empty(draft, device=device))


def training(call: Call, name: str, method_name: str, kind: Any, run_dir: Path, progress: StopAfter | None) -> Any:
    """`draftsmith.training.run.train` on random features; with a progress, it goes on with a run."""
    shape = call.shape(name)
    info, ends = target_of(shape, call.device)
    with first_alone() as first:
        if first:
            feature_store(call, name, info, ends)
    with drawn_on(call.device):
        return train(
            section=draft_section(call, shape, method_name),
            target=TargetOutline(info, ends),
            source=StoreSource(Store.open(call.into / f"features-{name}")),
            run_dir=run_dir,
            options=TrainOptions(
                max_steps=STEPS,
                tokens_per_row=shape.tokens * shape.documents,
                rows_per_step=call.rows,
                num_anchors=shape.anchors,
                lr=1e-4,
                eval_share=0,
                parallel=kind,
                device="cpu" if call.device == "cpu" else "auto",
            ),
            track=TrackOptions(console=False, tensorboard=False, every=WINDOW),
            resume=progress is not None,
            progress=progress,
        )


def windows(run_dir: Path) -> list[dict[str, Any]]:
    """The logged windows; of steps that were logged twice, the later."""
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return list({entry["step"]: entry for entry in entries if entry["kind"] == "train"}.values())


def comparison(call: Call, run_dir: Path, reference: Path) -> dict[str, Any]:
    """The run's losses and rate, and how far they are from those of one process."""
    found = windows(run_dir)
    losses = [round(entry["loss"], 6) for entry in found]
    rates = sorted(entry["tokens_per_second"] for entry in found[1:])  # the first window holds the start and compiling
    told: dict[str, Any] = {"losses": losses, "tokens_s": round(rates[len(rates) // 2]) if rates else None}
    told["memory_gib"] = round(max(entry["memory_gib"] for entry in found), 2)
    told["data_wait"] = round(max(entry["data_wait"] for entry in found[1:]), 3) if rates else None
    if reference == run_dir:
        return told
    if not (reference / "metrics.jsonl").exists():
        return {**told, "alone": "not measured: run the same part with one process first"}
    alone = {entry["step"]: entry for entry in windows(reference)}
    if not {entry["step"] for entry in found} <= alone.keys():
        return {**told, "alone": f"reached step {max(alone, default=0)} only"}
    differences = [abs(entry["loss"] / alone[entry["step"]]["loss"] - 1) for entry in found]
    rate = sorted(entry["tokens_per_second"] for entry in list(alone.values())[1:])[(len(alone) - 1) // 2]
    told["loss_difference"] = float(f"{max(differences):.2g}")
    if told["tokens_s"] is not None:
        told["share_of_alone_per_process"] = round(told["tokens_s"] / COUNT / rate, 3)
    return told


def unsaved(call: Call, part: str, name: str, method: str, kind: str, progress: StopAfter | None = None) -> Path:
    """A training from its beginning, of which no checkpoint is kept; its directory."""
    run_dir = call.into / f"{part}-{name}-{method}-{kind}-{COUNT}"
    with first_alone() as first:
        if first:
            shutil.rmtree(run_dir, ignore_errors=True)
    with patch.object(Loop, "save", lambda loop: None):
        training(call, name, method, kind, run_dir, progress)
    return run_dir


def train_part(call: Call, name: str, method: str, kind: str = "ddp") -> dict[str, Any]:
    run_dir = unsaved(call, "train", name, method, kind)
    return comparison(call, run_dir, call.into / f"train-{name}-{method}-ddp-1") if RANK == 0 else {}


def resume_part(call: Call, name: str, method: str, kind: str = "ddp") -> dict[str, Any]:
    run_dir = call.into / f"resume-{name}-{method}"
    result = training(call, name, method, kind, run_dir, StopAfter(STOP_AFTER))
    told = {"step": result.step, "stopped_by": result.interrupted_by}
    if RANK == 0 and result.step == STEPS:
        told |= comparison(call, run_dir, call.into / f"train-{name}-{method}-ddp-1")
    return told


def warm_part(call: Call, name: str, method: str, kind: str = "ddp") -> dict[str, Any]:
    unsaved(call, "warm", name, method, kind, StopAfter(1))
    return {}


def profile_part(call: Call, name: str, method: str, kind: str = "ddp") -> dict[str, Any]:
    profiled = Profiled(4, 4)
    unsaved(call, "profile", name, method, kind, profiled)
    if RANK == 0:
        print(profiled.table, flush=True)
    return {}


# --- the command line -------------------------------------------------------------------------------------------------


def wait_part(call: Call, name: str) -> dict[str, Any]:
    while not (call.into / name).exists():
        time.sleep(0.2)
    return {}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "train": train_part, "resume": resume_part, "profile": profile_part, "capture": capture_part,
    "rollout": rollout_part, "wait": wait_part, "warm": warm_part,
}  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--into", type=Path, required=True, help="directory for features, runs and captures")
    arguments.add_argument("--rows", type=int, default=8, help="rows of a step, of all processes together")
    arguments.add_argument("--documents", type=int, default=96, help="documents of the capture")
    arguments.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    arguments.add_argument("parts", nargs="+")
    given = arguments.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("draftsmith.capture").setLevel(logging.INFO)
    device = "cpu" if given.tiny or not torch.cuda.is_available() else "cuda"
    if device == "cuda":
        torch.cuda.set_device(local_rank())
    if COUNT > 1:
        PartialState(cpu=device == "cpu")  # starts the process group that training then uses
    call = Call(given.into, given.rows, given.documents, given.tiny, device)
    compiled = None
    for part in given.parts:
        name, *options = part.split(":")
        if name in ("train", "resume", "profile", "warm") and options[0] != compiled:
            torch._dynamo.reset()  # another shape is not to be compiled as a variant of this one
            compiled = options[0]
        started = time.monotonic()
        told = PARTS[name](call, *options)
        if RANK == 0:
            seconds = round(time.monotonic() - started, 1)
            print(json.dumps({"part": part, "processes": COUNT, **told, "part_s": seconds}), flush=True)
            (call.into / f"done-{part.replace(':', '-')}-{COUNT}").touch()
        gc.collect()
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
