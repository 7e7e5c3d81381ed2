"""How fast training gets its batches: out of a store, through reader processes, to the device.

    python benchmarks/train_loading.py make STORE --gib 2
    python benchmarks/train_loading.py stages STORE
    python benchmarks/train_loading.py rate STORE --workers 0 1 2 --batches 200
    python benchmarks/train_loading.py rate STORE --workers 4 8 --batches 1000 --host-ms 8 --device-ms 20.7

SmolLM2's shapes: five taps of 576 in bf16, documents of about 320 tokens, one row of 4,800 tokens a batch, 128 anchors
a document, blocks of 16. `make` writes a store of random features. `stages` times the parts of a batch in one process.
`rate` takes batches one after the other, by themselves or in a loop like training's, which keeps Python busy for
--host-ms and the device for --device-ms a step; what it prints are means over windows of the run, so that a rate that
falls shows. One JSON line a measurement.
"""

import argparse
import gc
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from draftsmith.algorithms.block_trainee import BLOCK_BUCKET, BlockMaker
from draftsmith.algorithms.costs import QWEN3_8B
from draftsmith.blocks.anchors import sample_anchors
from draftsmith.blocks.build import build_blocks
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.features.manifest import StoreHeader, TargetIdentity, TokenizerIdentity
from draftsmith.features.packing import collate
from draftsmith.features.reader import Store
from draftsmith.features.record import Record
from draftsmith.features.schema import TAPS, CaptureLayout
from draftsmith.features.shards import StoreWriter, finish_store
from draftsmith.training.loading import TrainingBatches
from draftsmith.training.micro_batch import BatchMaker, MicroBatch
from draftsmith.training.plan import StepPlan
from draftsmith.training.source import StoreSource

VOCABULARY, HIDDEN, TAP_IDS = 49_152, 576, (1, 8, 14, 20, 27)
TOKENS_PER_ROW, ANCHORS, SEED = 4800, 128, 7
LAYOUT = BlockLayout(BlockKind.ANCHOR_KNOWN, 16)


def make(directory: Path, gib: float) -> None:
    """Write a store of random features, of documents with lengths like gsm8k's with answers."""
    layout = CaptureLayout(TAP_IDS, HIDDEN, final_state=False)
    target = TargetIdentity(
        source="random",
        revision=None,
        config_hash="1" * 64,
        weights_hash="2" * 64,
        vocab_size=VOCABULARY,
        num_layers=30,
    )
    header = StoreHeader.for_layout(layout, target, TokenizerIdentity(vocabulary_hash="3" * 64, template_hash="4" * 64))
    rng = np.random.default_rng(SEED)
    width = layout.widths[TAPS]
    pool = torch.randn(8192, width, generator=torch.Generator().manual_seed(SEED)).to(layout.dtype)
    with StoreWriter(directory, header, 1 << 28) as writer:
        number, left = 0, int(gib * 2**30 / layout.bytes_per_token)
        while left > 0:
            length = int(np.clip(rng.normal(320, 90), 120, 1024))
            start = int(rng.integers(0, len(pool) - length))
            tokens = torch.from_numpy(rng.integers(0, VOCABULARY, length))
            mask = torch.arange(length) >= length // 3
            writer.add(Record(f"document-{number:06d}", tokens, mask, {TAPS: pool[start : start + length]}))
            number, left = number + 1, left - length
    manifest = finish_store(directory)
    show(part="make", documents=manifest.samples, tokens=manifest.tokens)


def parts_of(directory: Path) -> tuple[StepPlan, BatchMaker, list[int]]:
    """(plan, what makes batches, documents) of a training with one row a step."""
    store = Store.open(directory)
    plan = StepPlan(
        list(store.lengths),
        list(store.sample_ids),
        tokens_per_row=TOKENS_PER_ROW,
        rows_per_step=1,
        rows_per_forward=1,
        seed=SEED,
    )
    maker = BlockMaker(LAYOUT, QWEN3_8B.replace(mask_token_id=0))  # its other sizes only count operations
    source = StoreSource(store, store.features)
    return plan, BatchMaker(source, maker, TOKENS_PER_ROW, ANCHORS, SEED), list(range(len(store)))


class Stages:
    """Seconds by the name of a part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def stages(directory: Path, batches: int) -> None:
    """Time the parts of making a batch, in this process alone, ms a batch (means)."""
    from draftsmith.training.slots import Slots, pack

    plan, maker, _ = parts_of(directory)
    slots = Slots(1, maker.largest_micro_batch(1), shared=True)
    batches = min(batches, len(plan.rows(0)) - 1)  # every document is read, and so checked, for the first time once
    timed, size = Stages(), 0
    for number in range(batches + 1):
        if number == 1:
            timed = Stages()  # the first batch is the first to touch the slot's pages
        row, slot = plan.rows(0)[number], slots.slot(0)
        with timed("records, checked"):
            maker.source.records(row)
        with timed("records, again"):
            records = maker.source.records(row)
        with timed("collate"):
            packed = collate([records], TOKENS_PER_ROW, slot.empty)
        with timed("anchors"):
            anchors = sample_anchors(
                packed.loss_mask,
                packed.document,
                packed.sample_ids,
                LAYOUT,
                ANCHORS,
                seed=SEED,
                epoch=0,
                bucket=BLOCK_BUCKET,
            )
        with timed("blocks"):
            blocks = build_blocks(
                packed.input_ids, packed.loss_mask, packed.positions, packed.document, anchors, LAYOUT, 0
            )
        with timed("pack"):
            described = pack((packed, blocks), 0, slot)
        with timed("copy out of the slot, into new memory"):
            slots.filled(described).to(torch.device("cpu"))
        with timed("for comparison: collate into new memory"):
            collate([records], TOKENS_PER_ROW)
        with timed("for comparison: move that into new shared memory"):
            packed.features[TAPS].clone().share_memory_()
        size = described.used
    show(
        part="stages",
        batch_mib=round(size / 2**20, 2),
        slot_mib=round(maker.largest_micro_batch(1) / 2**20, 2),
        ms={name: round(1e3 * seconds / batches, 2) for name, seconds in timed.seconds.items()},
    )


def rate(
    directory: Path,
    workers: int,
    batches: int,
    device: torch.device,
    *,
    host_ms: float = 0.0,
    device_ms: float = 0.0,
    windows: int = 4,
    seconds: float = float("inf"),
    **labels: object,
) -> None:
    """Take `batches` batches, or as many as `seconds` allow, and print how long that took, by windows."""
    plan, maker, documents = parts_of(directory)
    source = TrainingBatches(plan, maker, documents, rank=0, num_ranks=1, workers=workers, device=device)
    cuda = device.type == "cuda"
    cycles = int(device_ms * 1e-3 * 1.98e9)
    done: list[torch.cuda.Event] = []
    waits, ends, held = [], [], []
    cpu_before, checked = time.process_time(), torch.zeros((), device=device)
    before_all = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    with closing(source.steps(0, 0, batches)) as steps:
        for step in steps:
            before = time.perf_counter()
            batch = next(step.micro_batches)
            waits.append(time.perf_counter() - before)
            if host_ms:
                spin(host_ms)
            checked = checked + use(batch)
            if cuda:
                if device_ms:
                    torch.cuda._sleep(cycles)
                done.append(torch.cuda.Event())
                done[-1].record()
                if len(done) > 2:
                    done.pop(0).synchronize()  # as training looks at a step's verdict two steps later
            ends.append(time.perf_counter() - started)
            held.append(len(os.listdir("/proc/self/fd")))
            if ends[-1] - ends[0] > seconds:
                break
    batches = len(ends)
    cpu = time.process_time() - cpu_before
    gc.collect()  # the loader's own objects, which wait for the workers' end
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    read = batches + workers  # about so many were made
    edges = [round(batches * part / windows) for part in range(windows + 1)]
    show(
        part="rate",
        **labels,
        device=str(device),
        workers=workers,
        host_ms=host_ms,
        device_ms=device_ms,
        batches=batches,
        first_batch_s=round(ends[0], 3),
        per_second=round((batches - 1) / (ends[-1] - ends[0]), 1),
        windows_per_second=[
            round((b - a) / (ends[b - 1] - (ends[a - 1] if a else ends[0]) + 1e-9), 1) for a, b in pairwise(edges)
        ],
        waited_share=[
            round(sum(waits[max(1, a) : b]) / (ends[b - 1] - (ends[a - 1] if a else ends[0]) + 1e-9), 2)
            for a, b in pairwise(edges)
        ],
        longest_wait_ms=round(1e3 * max(waits[1:]), 1),
        cpu_ms_a_batch_here=round(1e3 * cpu / batches, 2),
        reader_ms_a_batch={
            "user": round(1e3 * (children.ru_utime - before_all.ru_utime) / read, 2),
            "system": round(1e3 * (children.ru_stime - before_all.ru_stime) / read, 2),
            "page_faults": round((children.ru_minflt - before_all.ru_minflt) / read),
        },
        open_files=[held[0], held[-1]],
        peak_mib_here=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        content=float(checked),  # the same for every number of workers
    )


def use(batch: MicroBatch) -> torch.Tensor:
    """Something of every part that a step reads."""
    return batch.packed.features[TAPS][0, ::97, ::89].float().abs().sum() + batch.examples.labels.sum() % 1000


def spin(milliseconds: float) -> None:
    """Keep Python busy, as launching a step does."""
    until, number = time.perf_counter() + 1e-3 * milliseconds, 0
    while time.perf_counter() < until:
        number += 1


def show(**values: object) -> None:
    """Print one JSON line."""
    print(json.dumps(values), flush=True)


def main() -> None:
    """Parse the command line and run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("make", "stages", "rate"))
    parser.add_argument("store", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop earlier, after so long")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--host-ms", type=float, default=0.0)
    parser.add_argument("--device-ms", type=float, default=0.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.part == "make":
        make(given.store, given.gib)
    elif given.part == "stages":
        stages(given.store, given.batches)
    else:
        for workers in given.workers:
            rate(
                given.store,
                workers,
                given.batches,
                torch.device(given.device),
                host_ms=given.host_ms,
                device_ms=given.device_ms,
                windows=given.windows,
                seconds=given.seconds,
            )


if __name__ == "__main__":
    main()
