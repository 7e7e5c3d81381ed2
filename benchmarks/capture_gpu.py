"""How much of a target's speed a capture keeps: tokens/s stored against tokens/s thrown away.

    python benchmarks/capture_gpu.py --documents 400 --into /dev/shm/capture --into /var/tmp/capture:fp8:160

A target of Qwen3-8B's shapes with random weights runs over documents of 2,048 tokens. Measured are captures into every
directory, before and after each of them the same forwards with the features thrown away, and what the machine itself
does: copies to the host, checksums, and the bandwidth of each directory's disk. Of a capture the rates are given
without its first batches (also for each quarter of what follows, and up to the moment when the last file is synced) and
as a whole, and the seconds that its threads spend on what. Prints one JSON line a measurement; a part that fails is
reported and the others go on. The directories' captures are removed again.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from draftsmith.capture import pipeline
from draftsmith.capture.hf import HfBackend
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.plan import plan_batches
from draftsmith.capture.run import capture
from draftsmith.capture.transfer import HostTransfer
from draftsmith.data.sample import Sample
from draftsmith.features import shards
from draftsmith.features.files import Pieces, write_safetensors
from draftsmith.features.identity import Provenance, target_identity
from draftsmith.features.schema import CaptureLayout
from draftsmith.targets.target import Target

GIB = 1 << 30
TAPS = (1, 9, 17, 25, 33)
# Batches that count as the start of a capture: page-locked buffers are allotted there, and caches fill.
BEGINNING = 4


def qwen3_8b(layers: int, hidden: int, device: str) -> Target:
    """Random weights in Qwen3-8B's shapes (with fewer layers and a smaller width for a trial on a CPU)."""
    config = Qwen3Config(
        vocab_size=151_936 if device == "cuda" else 1000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return Target.from_model(model)


def documents(count: int, length: int, vocab_size: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    return [
        Sample(
            f"document-{number}",
            torch.randint(0, vocab_size, (length,), generator=generator),
            torch.ones(length, dtype=torch.bool),
        )
        for number in range(count)
    ]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def thrown_away(
    target: Target, layout: CaptureLayout, samples: Sequence[Sample], tokens_per_batch: int
) -> dict[str, Any]:
    """The forwards alone."""
    backend = HfBackend(target, layout)
    batches = plan_batches(samples, tokens_per_batch)
    for batch in batches[:2]:
        backend.features(batch)
    synchronize()
    start = time.perf_counter()
    for batch in batches:
        backend.features(batch)
    synchronize()
    seconds = time.perf_counter() - start
    tokens = sum(sample.input_ids.shape[0] for sample in samples)
    return {"seconds": round(seconds, 2), "tokens_per_second": round(tokens / seconds)}


class Clock:
    """A `Progress` that only notes when each batch was handed to the writer."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    @contextmanager
    def stage(self, name: str, total: float | None, unit: str) -> Iterator["Clock"]:
        yield self

    def advance(self, amount: float = 1.0, **fields: str) -> None:
        self.times.append((time.perf_counter(), amount))

    def rate(self, first: int, last: int) -> float:
        """Amount a second from the end of batch `first` to the end of batch `last`."""
        return sum(amount for _, amount in self.times[first + 1 : last + 1]) / (
            self.times[last][0] - self.times[first][0]
        )

    def rest(self, first: int, end: float) -> float:
        """Amount a second from the end of batch `first` to `end`, when everything is on the disk."""
        return sum(amount for _, amount in self.times[first + 1 :]) / (end - self.times[first][0])


# What is timed, in three kinds of threads: the one that computes, the one that cuts batches into records, and those
# that write shards (`PARALLEL_SHARDS` of them, whose seconds are added up).
TIMED: tuple[tuple[str, Any, str], ...] = (
    ("computing: launch forwards", HfBackend, "features"),
    ("computing: encode, check finite", pipeline, "_stored"),
    ("computing: wait for a buffer, launch copies", HostTransfer, "start"),
    ("computing: wait for the batch", torch.cuda.Event, "synchronize"),
    ("records: all", pipeline, "_store"),
    ("records: wait for shards", shards.StoreWriter, "_wait"),
    ("shards: all", shards, "_write_shard"),
    ("shards: checksums of documents, beside the writing", shards, "_checksums"),
    ("shards: sync", os, "fsync"),
)


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """The seconds that a capture spends in each of `TIMED`, while the context lasts."""
    seconds = dict.fromkeys((name for name, _, _ in TIMED), 0.0)
    lock = threading.Lock()

    def wrap(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*arguments, **named)
            finally:
                with lock:
                    seconds[name] += time.perf_counter() - start

        return run

    plain = [(owner, attribute, getattr(owner, attribute)) for _, owner, attribute in TIMED]
    for (name, owner, attribute), (_, _, work) in zip(TIMED, plain, strict=True):
        setattr(owner, attribute, wrap(name, work))
    try:
        yield seconds
    finally:
        for owner, attribute, work in plain:
            setattr(owner, attribute, work)


def stored(
    target: Target,
    layout: CaptureLayout,
    samples: Sequence[Sample],
    tokens_per_batch: int,
    directory: Path,
    dtype: str,
) -> dict[str, Any]:
    """A whole capture, and its rates without the first `BEGINNING` batches."""
    options = CaptureOptions(dtype=dtype, tokens_per_batch=tokens_per_batch)  # type: ignore[arg-type]
    origin = Provenance(target_identity("random", None, target.text_config, target.ends.head_weight), None)
    shutil.rmtree(directory, ignore_errors=True)
    try:
        clock = Clock()
        with timed() as seconds:
            report = capture(target, samples, layout, directory, options, origin, clock)
        end = time.perf_counter()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    batches = len(clock.times)
    # A batch is handed over once the next one is launched, the last one at once: it is none to measure up to.
    first, last = min(BEGINNING, batches - 3), batches - 2
    quarters = [first + round((last - first) * part / 4) for part in range(5)]
    return {
        "steady_tokens_per_second": round(clock.rate(first, last)),
        "steady_to_the_last_sync": round(clock.rest(first, end)),
        "quarters": [round(clock.rate(one, two)) for one, two in pairwise(quarters) if two > one],
        "whole_tokens_per_second": round(report.manifest.tokens / report.seconds),
        "seconds": round(report.seconds, 2),
        "gib": round(report.manifest.bytes / GIB, 2),
        "gib_per_second_steady": round(
            clock.rate(first, last) * report.manifest.bytes / report.manifest.tokens / GIB, 3
        ),
        "batches": batches,
        "shards": len(report.manifest.shards),
        "spent": {name: round(value, 2) for name, value in seconds.items()},
    }


def rate(work: Callable[[], object], size: int, threads: int = 1) -> float:
    """GiB/s of `work` on `size` bytes, done by so many threads at a time."""
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()
    return round(threads * size / (time.perf_counter() - start) / GIB, 3)


def machine(size: int) -> dict[str, object]:
    """Copies and checksums."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    view = data.numpy().data
    threads = shards.PARALLEL_SHARDS
    rates: dict[str, object] = {
        "crc32": rate(lambda: zlib.crc32(view), size),
        "sha256": rate(lambda: hashlib.sha256(view).digest(), size),
        "clone": rate(data.clone, size),
        f"crc32_x{threads}": rate(lambda: zlib.crc32(view), size, threads),
        f"sha256_x{threads}": rate(lambda: hashlib.sha256(view).digest(), size, threads),
        f"clone_x{threads}": rate(data.clone, size, threads),
    }
    if torch.cuda.is_available():
        on_device = data.cuda()
        start = time.perf_counter()
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        rates["seconds_to_pin"] = round(time.perf_counter() - start, 3)

        def to_host() -> None:
            pinned.copy_(on_device, non_blocking=True)
            synchronize()

        to_host()
        rates["to_host"] = rate(to_host, size)
        rates["clone_from_pinned"] = rate(pinned.clone, size)
    return {"gib_per_second": rates}


def disk(directory: Path, size: int, files: int, threads: int) -> dict[str, object]:
    """Bandwidth of writing and syncing files, `threads` at a time: without any hashing, and as shards are written."""
    directory.mkdir(parents=True, exist_ok=True)
    data = torch.randint(0, 256, (1, size), dtype=torch.uint8)
    tensors = {"taps": Pieces([data])}

    def plain(number: int) -> None:
        with (directory / f"plain-{number}").open("wb") as file:
            file.write(data.numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def shard(number: int) -> None:
        write_safetensors(directory / f"shard-{number}", tensors, {})

    result: dict[str, object] = {"threads": threads, "gib": round(files * size / GIB, 2)}
    for work in (plain, shard):
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(work, number) for number in range(files)]:
                future.result()
        result[f"{work.__name__}_gib_per_second"] = round(files * size / (time.perf_counter() - start) / GIB, 3)
        for path in directory.iterdir():
            path.unlink()
    return result


def profile(target: Target, layout: CaptureLayout, samples: Sequence[Sample], tokens_per_batch: int) -> None:
    backend = HfBackend(target, layout)
    batch = plan_batches(samples, tokens_per_batch)[0]
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        backend.features(batch)
        synchronize()
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(recorded.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=60), flush=True)


def say(part: str, **values: object) -> None:
    print(json.dumps({"part": part, **values}), flush=True)


def attempt(part: str, work: Callable[[], dict[str, Any]], **values: object) -> dict[str, Any]:
    """Run one part and print its line; a failure is printed as one, so that the other parts still run."""
    try:
        result = work()
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    say(part, **values, **result)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--final-state", action="store_true", help="keep the final state too (DSpark)")
    parser.add_argument("--tokens-per-batch", type=int, default=16_384)
    parser.add_argument("--parallel-shards", type=int, default=shards.PARALLEL_SHARDS)
    parser.add_argument(
        "--into", type=Run.parse, action="append", default=[], help="DIRECTORY or DIRECTORY:DTYPE:DOCUMENTS, repeatable"
    )
    parser.add_argument("--base-documents", type=int, default=64, help="of the forwards alone, beside each capture")
    parser.add_argument("--probe-gib", type=float, default=1.0, help="size of a file in the disk's own measurement")
    parser.add_argument("--probe-files", type=int, default=6, help="files in the disk's own measurement")
    parser.add_argument("--skip", nargs="*", default=[], choices=["machine", "disk"], help="measurements to leave out")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = int(arguments.probe_gib * GIB)
    shards.PARALLEL_SHARDS = arguments.parallel_shards
    if "machine" not in arguments.skip:
        attempt("machine", partial(machine, size))
    for directory in {} if "disk" in arguments.skip else dict.fromkeys(run.directory for run in arguments.into):
        probe = partial(disk, directory, size, arguments.probe_files, arguments.parallel_shards)
        attempt("disk", probe, directory=str(directory))
    start = time.perf_counter()
    target = qwen3_8b(arguments.layers, arguments.hidden, device)
    say("target", seconds=round(time.perf_counter() - start, 1), device=_device_name(), torch=torch.__version__)
    taps = tuple(tap for tap in TAPS if tap < arguments.layers)
    layout = CaptureLayout(taps, target.hidden_size, arguments.final_state)
    samples = documents(arguments.documents, arguments.length, target.vocab_size)
    if arguments.profile:
        profile(target, layout, samples, arguments.tokens_per_batch)

    # Between the captures, since a device's clock falls while it gets warm.
    alone = partial(thrown_away, target, layout, samples[: arguments.base_documents], arguments.tokens_per_batch)
    before = attempt("thrown away", alone)
    for run in arguments.into:
        taken = samples[: run.documents]
        work = partial(stored, target, layout, taken, arguments.tokens_per_batch, run.directory / "store", run.dtype)
        kept = attempt("stored", work, directory=str(run.directory), dtype=run.dtype, documents=len(taken))
        after = attempt("thrown away", alone)
        if not any("error" in result for result in (before, kept, after)):
            base = (before["tokens_per_second"] + after["tokens_per_second"]) / 2
            shares = {
                name: round(kept[name] / base, 3)
                for name in ("steady_tokens_per_second", "steady_to_the_last_sync", "whole_tokens_per_second")
            }
            say("share of thrown away", directory=str(run.directory), dtype=run.dtype, base=round(base), **shares)
        before = after
    return 0


@dataclass(frozen=True)
class Run:
    """One capture: where, in which dtype, and of how many documents (None: all)."""

    directory: Path
    dtype: str = "bfloat16"
    documents: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Run":
        directory, _, rest = text.partition(":")
        dtype, _, count = rest.partition(":")
        return cls(Path(directory), dtype or cls.dtype, int(count) if count else None)


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
