"""Training and capture by several processes against one: losses, tokens/s, checkpoints that change hands, records.

    python benchmarks/two_gpus.py --into /dev/shm/two train:smollm2:dflash capture
    torchrun --standalone --nproc-per-node 2 benchmarks/two_gpus.py --into /dev/shm/two \\
        train:smollm2:dflash train:smollm2:dflash:fsdp capture

One process comes first: what it leaves in the directory is what several are compared with. `resume` trains on from
where its run stands and stops after 7 steps, so that three calls in turn, by whatever processes, make a whole run, of
20 steps; the last one is compared with `train`'s. Parts:

    train:SHAPE:METHOD[:fsdp]     20 steps on random features: loss of every 5 steps, tokens/s of each process
    resume:SHAPE:METHOD[:fsdp]    8 steps more of one run
    capture                       a target of random weights over random documents: records and tokens/s

SHAPE is smollm2 or qwen3-8b, METHOD a method's name. A step has the same `--rows` rows however many processes share
them. `--tiny` shrinks every size, so that all of it runs on a CPU (gloo). Prints one JSON line a part; a failure ends
the call, since the other processes would wait for the one that failed.
"""

import argparse
import gc
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from draftsmith.algorithms.registry import algorithm
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.run import capture
from draftsmith.data.sample import Sample
from draftsmith.features.identity import Provenance, target_identity
from draftsmith.features.manifest import STORE_DTYPES, StoreHeader
from draftsmith.features.reader import Store
from draftsmith.features.record import Record
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import StoreWriter, finish_store
from draftsmith.outline import TargetOutline
from draftsmith.progress import Stage
from draftsmith.recipe import parse_recipe
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.target import Target
from draftsmith.training.options import TrackOptions, TrainOptions
from draftsmith.training.record import CHECKPOINTS
from draftsmith.training.run import train

STEPS, WINDOW = 20, 5
STOP_AFTER = 7  # the step that runs when the signal comes is the last one
RANK, COUNT = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Shape:
    """A target's sizes, and the documents of one row of training."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    taps: tuple[int, ...]
    tokens: int  # of a document
    documents: int  # in a row
    anchors: int  # in a document

    def text_config(self) -> PretrainedConfig:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=40_960,
            tie_word_embeddings=False,
        )


SHAPES = {
    "smollm2": Shape(576, 30, 9, 3, 64, 1536, 49_152, (1, 8, 14, 20, 27), 448, 16, 128),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12_288, 151_936, (1, 9, 17, 25, 33), 3072, 1, 512),
}
TINY = {
    "smollm2": Shape(32, 4, 2, 1, 16, 48, 97, (1, 3), 24, 3, 6),
    "qwen3-8b": Shape(48, 5, 3, 1, 16, 64, 131, (1, 3), 40, 1, 8),
}


@dataclass(frozen=True)
class Call:
    """What the command line says."""

    into: Path
    rows: int
    documents: int
    tiny: bool
    device: str

    def shape(self, name: str) -> Shape:
        return (TINY if self.tiny else SHAPES)[name]


@contextmanager
def first_alone() -> Iterator[bool]:
    """Whether this is the process that does what one does for all, when all have come here; the others wait for it."""
    if dist.is_initialized():
        dist.barrier()
    yield RANK == 0
    if dist.is_initialized():
        dist.barrier()


# --- training -------------------------------------------------------------------------------------------------------


def outline_of(shape: Shape, device: str) -> TargetOutline:
    """Configuration and random ends: the same in every process, and in every call on the same kind of device."""
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.vocabulary, shape.hidden)
    embedding, head = (
        torch.empty(size, device=device, dtype=torch.bfloat16).normal_(std=0.02, generator=generator) for _ in range(2)
    )
    return TargetOutline(shape.text_config(), TargetEnds(embedding, head), None, "random", None)


def feature_store(call: Call, name: str, outline: TargetOutline) -> Store:
    """Random features of two steps' documents, as the method that reads most of them needs; written once."""
    shape, directory = call.shape(name), call.into / f"features-{name}"
    if (directory / "manifest.json").exists():
        return Store.open(directory)
    layout = CaptureLayout(shape.taps, shape.hidden, final_state=True)
    identity = target_identity("random", None, outline.text_config, outline.ends.head_weight)
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


def training(call: Call, name: str, method_name: str, kind: str, run_dir: Path, *, further: int | None) -> Any:
    """`draftsmith.training.run.train` on random features; `further`: go on with a run by so many steps."""
    shape, method = call.shape(name), algorithm(method_name)
    outline = outline_of(shape, call.device)
    with first_alone() as first:
        if first:
            feature_store(call, name, outline)
    head = method.published_head if method.architecture != "dflash" else {}
    if call.tiny and "markov_rank" in head:
        head = {**head, "markov_rank": 6}
    fields = {
        "algorithm": method_name,
        "block_size": 4 if call.tiny else 16,
        "num_hidden_layers": 1 if call.tiny else 5,
        "target_layer_ids": shape.taps,
        "mask_token_id": shape.vocabulary - 1,
        **head,
    }
    return train(
        draft_section=parse_recipe({"run": "run", "target": {"path": "random"}, "draft": fields}).draft,
        target=outline,
        ends=outline.ends,
        store=Store.open(call.into / f"features-{name}"),
        run_dir=run_dir,
        options=TrainOptions(
            max_steps=STEPS,
            tokens_per_row=shape.tokens * shape.documents,
            rows_per_step=call.rows,
            num_anchors=shape.anchors,
            lr=1e-4,
            eval_share=0,
            parallel=kind,  # type: ignore[arg-type]
            device="cpu" if call.device == "cpu" else "auto",
        ),
        track=TrackOptions(console=False, tensorboard=False, every=WINDOW),
        resume=further is not None,
        progress=None if further is None else StopAfter(further),
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
    if reference == run_dir:
        return told
    if not (reference / "metrics.jsonl").exists():
        return {**told, "alone": "not measured: run the same part with one process first"}
    alone = {entry["step"]: entry for entry in windows(reference)}
    differences = [abs(entry["loss"] / alone[entry["step"]]["loss"] - 1) for entry in found]
    rate = sorted(entry["tokens_per_second"] for entry in list(alone.values())[1:])[(len(alone) - 1) // 2]
    told["loss_difference"] = float(f"{max(differences):.2g}")
    if told["tokens_s"] is not None:
        told["share_of_alone_per_process"] = round(told["tokens_s"] / COUNT / rate, 3)
    return told


def train_part(call: Call, name: str, method: str, kind: str = "ddp") -> dict[str, Any]:
    run_dir = call.into / f"train-{name}-{method}-{kind}-{COUNT}"
    with first_alone() as first:
        if first:
            shutil.rmtree(run_dir, ignore_errors=True)
    training(call, name, method, kind, run_dir, further=None)
    with first_alone() as first:
        if first:
            shutil.rmtree(run_dir / CHECKPOINTS)  # tens of gigabytes, in memory where the directory is /dev/shm
    return comparison(call, run_dir, call.into / f"train-{name}-{method}-ddp-1") if RANK == 0 else {}


def resume_part(call: Call, name: str, method: str, kind: str = "ddp") -> dict[str, Any]:
    run_dir = call.into / f"resume-{name}-{method}"
    result = training(call, name, method, kind, run_dir, further=STOP_AFTER)
    told = {"step": result.step, "stopped_by": result.interrupted_by}
    if RANK == 0 and result.step == STEPS:
        told |= comparison(call, run_dir, call.into / f"train-{name}-{method}-ddp-1")
    return told


# --- capture --------------------------------------------------------------------------------------------------------


def capture_part(call: Call, name: str = "qwen3-8b") -> dict[str, Any]:
    shape = call.shape(name)
    device = call.device if call.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.text_config(), dtype=torch.bfloat16)
    target = Target.from_model(model.eval())
    generator = torch.Generator().manual_seed(1)
    samples = [
        Sample(
            f"document-{number:04d}",
            torch.randint(shape.vocabulary, (shape.tokens,), generator=generator),
            torch.ones(shape.tokens, dtype=torch.bool),
        )
        for number in range(call.documents)
    ]
    identity = target_identity("random", None, target.text_config, target.ends.head_weight)
    options = CaptureOptions(tokens_per_batch=4 * shape.tokens)
    layout = CaptureLayout(shape.taps, shape.hidden, final_state=True, dtype=STORE_DTYPES[options.dtype])
    directory, reference = call.into / f"capture-{COUNT}", call.into / "capture-1"
    if RANK == 0:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(call.into / "warm", ignore_errors=True)
    # The first forwards load kernels; where there are several processes, they wait for each other here as well.
    warm = [Sample(f"warm-{n}", sample.input_ids, sample.loss_mask) for n, sample in enumerate(samples[: 4 * COUNT])]
    capture(target, warm, layout, call.into / "warm", options, Provenance(identity, None))
    report = capture(target, samples, layout, directory, options, Provenance(identity, None))
    if RANK != 0:
        return {}
    tokens = call.documents * shape.tokens
    told: dict[str, Any] = {"documents": report.captured, "tokens_s": round(tokens / report.seconds)}
    told["seconds"] = round(report.seconds, 2)
    if COUNT == 1:
        (reference / "rate.txt").write_text(str(told["tokens_s"]))
    elif (reference / "rate.txt").exists():
        told["times_alone"] = round(told["tokens_s"] / float((reference / "rate.txt").read_text()), 3)
        told |= records_beside(Store.open(directory), Store.open(reference))
    return told


def records_beside(one: Store, other: Store) -> dict[str, Any]:
    """Whether two stores hold the same samples, and how many of their records are the same bit for bit."""
    numbers = {sample_id: number for number, sample_id in enumerate(other.sample_ids)}
    same_set = sorted(one.sample_ids) == sorted(numbers)
    equal, largest = 0, 0.0
    for number, sample_id in enumerate(one.sample_ids):
        a, b = one[number], other[numbers[sample_id]]
        differences = [float((a.features[k].float() - b.features[k].float()).abs().max()) for k in a.features]
        equal += max(differences) == 0 and torch.equal(a.input_ids, b.input_ids)
        largest = max(largest, *differences)
    return {"same_set": same_set, "equal_records": equal, "largest_difference": largest}


PARTS = {"train": train_part, "resume": resume_part, "capture": capture_part}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--into", type=Path, required=True, help="directory for features, runs and captures")
    arguments.add_argument("--rows", type=int, default=8, help="rows of a step, of all processes together")
    arguments.add_argument("--documents", type=int, default=96, help="documents of the capture")
    arguments.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    arguments.add_argument("parts", nargs="+")
    given = arguments.parse_args()
    logging.basicConfig(level=logging.WARNING)
    device = "cpu" if given.tiny or not torch.cuda.is_available() else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if COUNT > 1:
        PartialState(cpu=device == "cpu")  # starts the process group that training then uses
    call = Call(given.into, given.rows, given.documents, given.tiny, device)
    for part in given.parts:
        name, *options = part.split(":")
        started = time.monotonic()
        told = PARTS[name](call, *options)
        if RANK == 0:
            seconds = round(time.monotonic() - started, 1)
            print(json.dumps({"part": part, "processes": COUNT, **told, "part_s": seconds}), flush=True)
        torch._dynamo.reset()  # another shape is not to be compiled as a variant of this one
        gc.collect()
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
