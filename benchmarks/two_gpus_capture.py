"""The part `capture` of `two_gpus.py`: a store filled by several processes, beside one process's."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device_timing import say
from transformers import AutoModelForCausalLM
from two_gpus_shapes import COUNT, RANK, Call

from draftsmith.base.progress import Stage
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.run import capture
from draftsmith.data.sample import Sample
from draftsmith.features.identity import Provenance, target_identity
from draftsmith.features.manifest import STORE_DTYPES
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import TOKENS_ENDING
from draftsmith.features.tables import ShardTokens
from draftsmith.parallel.ranks import local_rank
from draftsmith.targets.target import Target


class Arrivals:
    """A progress that notes when how many tokens of this process's share had been handed to the store's threads."""

    def __init__(self) -> None:
        self.tokens: list[tuple[float, float]] = []

    @contextmanager
    def stage(self, name: str, total: float | None, unit: str) -> Iterator[Stage]:
        yield self

    def advance(self, amount: float = 1.0, **fields: str) -> None:
        self.tokens.append((time.monotonic(), amount))

    def rate(self) -> float:
        """Tokens a second, of all processes, between each one's first batch and its last."""
        counted = sum(amount for _, amount in self.tokens[1:])
        own = counted / (self.tokens[-1][0] - self.tokens[0][0])
        rates: list[Any] = [own] * COUNT
        if COUNT > 1:
            dist.all_gather_object(rates, own)
        return sum(rates)


def capture_part(call: Call, name: str = "qwen3-8b") -> dict[str, Any]:
    shape = call.shape(name)
    device = call.device if call.device == "cpu" else f"cuda:{local_rank()}"
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
    # Small shards: after the last batch few bytes are left to write, as at the end of a long capture.
    options = CaptureOptions(tokens_per_batch=2 * shape.tokens, shard_bytes=1 << 28)
    layout = CaptureLayout(shape.taps, shape.hidden, final_state=True, dtype=STORE_DTYPES[options.dtype])
    directory, reference = call.into / f"capture-{COUNT}", call.into / "capture-1"
    if RANK == 0:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(call.into / "warm", ignore_errors=True)
    say(process=RANK, model="ready")
    # The first forwards load kernels; where there are several processes, they wait for each other here as well.
    warm = [Sample(f"warm-{n}", sample.input_ids, sample.loss_mask) for n, sample in enumerate(samples[: 4 * COUNT])]
    capture(target, warm, layout, call.into / "warm", options, Provenance(identity, None))
    say(process=RANK, first_batches="stored")
    arrivals = Arrivals()
    report = capture(target, samples, layout, directory, options, Provenance(identity, None), arrivals)
    steady = round(arrivals.rate())
    if RANK != 0:
        return {}
    told: dict[str, Any] = {"documents": report.captured, "tokens_s": steady}
    told["tokens_s_with_start_and_end"] = round(call.documents * shape.tokens / report.seconds)
    told["seconds"] = round(report.seconds, 2)
    if COUNT == 1:
        (reference / "rate.json").write_text(json.dumps(told))
    elif (reference / "rate.json").exists():
        alone = json.loads((reference / "rate.json").read_text())
        told |= {f"{rate}_of_alone": round(told[rate] / alone[rate], 3) for rate in told if rate.startswith("tokens_s")}
        told |= records_beside(directory, reference)
    return told


def records_beside(directory: Path, reference: Path) -> dict[str, Any]:
    """Whether two stores hold the same samples, and how many of their records are equal: same tokens, and the same
    CRC-32 of each feature, as the writers of the stores took them."""
    one, other = checksums(directory), checksums(reference)
    told: dict[str, Any] = {
        "same_set": one.keys() == other.keys(),
        "equal_records": sum(one[id_] == other.get(id_) for id_ in one),
    }
    different = [id_ for id_ in one if id_ in other and one[id_] != other[id_]][:4]
    if different:
        stores = Store.open(directory), Store.open(reference)
        records = [[store[store.index_of(id_)].features for store in stores] for id_ in different]
        differences = [(a[name].float() - b[name].float()).abs().max() for a, b in records for name in a]
        told["largest_difference"] = float(max(differences))
    return told


def checksums(directory: Path) -> dict[str, tuple[list[int], list[int]]]:
    """Id -> (tokens, the CRC-32 of each feature) of every document of a store."""
    found = {}
    for path in directory.glob(f"*{TOKENS_ENDING}"):
        shard = ShardTokens.read(path)
        tokens = shard.input_ids.split(shard.lengths)
        for number, sample_id in enumerate(shard.sample_ids):
            sums = [values[number] for _, values in sorted(shard.checksums.items())]
            found[sample_id] = (tokens[number].tolist(), sums)
    return found
