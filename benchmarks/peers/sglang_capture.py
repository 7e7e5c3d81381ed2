"""Capture through a real SGLang beside transformers: the same features, and how fast.

    python benchmarks/peers/sglang_capture.py MODEL --taps 1 8 14 20 27 [--final-state] [--dtype bfloat16]
        [--documents 64 --tokens 512] [--engine attention_backend=triton sampling_backend=pytorch grammar_backend=none]

Documents of random tokens, of 1 to `--tokens` tokens, go through the backends `hf` and `sglang` on the same device.
Prints one JSON line for each tapped layer and the final state: the median and the largest distance over tokens, as a
share of the state's length, of sglang from hf, and of both from hf in float32; and one line with the tokens a second of
each backend, of its second pass. `hf` runs before the engine takes the GPU's memory. The engine needs sglang >= 0.5.23.
"""

import argparse
import json
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.capture.backend import CaptureBackend
from draftsmith.capture.hf import HfBackend
from draftsmith.capture.options import SglangOptions
from draftsmith.capture.plan import plan_batches
from draftsmith.capture.sglang import SglangBackend, check_capture, check_version
from draftsmith.data.sample import Sample
from draftsmith.features.schema import TAPS, CaptureLayout
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.servers import architecture_of
from draftsmith.targets.target import Target


def documents(count: int, longest: int, vocab_size: int) -> list[Sample]:
    """Random tokens; the first document has one, the last as many as any may have."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    lengths[0], lengths[-1] = 1, longest
    texts = [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]
    return [Sample(f"text-{n}", ids, torch.ones_like(ids, dtype=torch.bool)) for n, ids in enumerate(texts)]


def features_of(
    backend: CaptureBackend, samples: Sequence[Sample], tokens_per_batch: int
) -> tuple[dict[str, dict[str, Tensor]], float]:
    """Sample id -> features on the CPU, and the tokens a second of a second pass over all of them."""
    batches = plan_batches(samples, tokens_per_batch)
    found: dict[str, dict[str, Tensor]] = {}
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for batch in batches:
            for sample, features in zip(batch, backend.features(batch), strict=True):
                found[sample.id] = {name: tensor.cpu() for name, tensor in features.items()}
        seconds = time.perf_counter() - start
    return found, sum(sample.input_ids.shape[0] for sample in samples) / seconds


def distances(
    ours: dict[str, dict[str, Tensor]], theirs: dict[str, dict[str, Tensor]], layout: CaptureLayout
) -> dict[str, dict[str, float]]:
    """Layer -> median and largest |ours - theirs| / |theirs| over all tokens."""
    by_layer: dict[str, list[Tensor]] = {}
    for sample_id, features in theirs.items():
        for name, wanted in features.items():
            pairs = [
                states.float().unflatten(-1, (-1, layout.hidden_size)).unbind(1)
                for states in (ours[sample_id][name], wanted)
            ]
            for number, (a, b) in enumerate(zip(*pairs, strict=True)):
                layer = f"tap {layout.tap_ids[number]}" if name == TAPS else name
                by_layer.setdefault(layer, []).append((a - b).norm(dim=-1) / b.norm(dim=-1))
    joined = {layer: torch.cat(rows) for layer, rows in by_layer.items()}
    return {layer: {"median": float(rows.median()), "max": float(rows.max())} for layer, rows in joined.items()}


def engine_keywords(words: Sequence[str]) -> dict[str, str | int | float | bool]:
    """NAME=VALUE words; a value that is JSON is read as such."""
    found: dict[str, str | int | float | bool] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--taps", type=int, nargs="+", required=True)
    parser.add_argument("--final-state", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--method", choices=("dflash", "eagle3"), default="dflash")
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    parser.add_argument("--memory-fraction", type=float, default=0.6)
    parser.add_argument("--engine", nargs="*", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    check_version()

    options = TargetOptions(path=given.model, dtype=given.dtype, device=given.device, fuse="off")
    target = Target.load(**options.model_dump())
    dtype, architecture, layers = target.dtype, architecture_of(target.text_config), target.num_layers
    layout = CaptureLayout(tuple(given.taps), target.hidden_size, given.final_state, dtype)
    sglang = SglangOptions(
        capture_method=given.method, memory_fraction=given.memory_fraction, engine=engine_keywords(given.engine)
    )
    check_capture(layout, layers, architecture, sglang)
    samples = documents(given.documents, given.tokens, target.vocab_size)
    theirs, rate = features_of(HfBackend(target, layout), samples, given.tokens_per_batch)
    rates = {"hf": rate}
    del target
    exact = Target.load(**options.model_copy(update={"dtype": "float32"}).model_dump())
    reference, _ = features_of(HfBackend(exact, layout), samples, given.tokens_per_batch)
    del exact
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    start = time.perf_counter()
    backend = SglangBackend(options, dtype, layout, sglang)
    started = time.perf_counter() - start
    try:
        ours, rates["sglang"] = features_of(backend, samples, given.tokens_per_batch)
    finally:
        backend.close()
    compared = {
        "sglang-hf": distances(ours, theirs, layout),
        "sglang-float32": distances(ours, reference, layout),
        "hf-float32": distances(theirs, reference, layout),
    }
    for layer in compared["sglang-hf"]:
        print(json.dumps({"layer": layer} | {name: found[layer] for name, found in compared.items()}), flush=True)
    share = rates["sglang"] / rates["hf"]
    print(json.dumps({"tokens_per_second": rates, "sglang/hf": share, "engine_start_seconds": started}), flush=True)


if __name__ == "__main__":
    main()
