"""Products of up to 32 rows, and what a verify of 17 tokens costs beside one of 16, on one GPU.

    python benchmarks/few_rows_gpu.py products sweep cycles target others

Random weights at the shapes of SmolLM2-135M and Qwen3-8B, bf16. Everything is timed as replays of a CUDA graph; weights
rotate, so that the L2 cache does not hold them. The floor is the weight's bytes over the bandwidth of a large copy.
Prints one JSON line a measurement.

`products`: `skinny_linear` against `torch.nn.functional.linear`, by rows. `sweep`: its tiles. `cycles`: steps of the
engine on SmolLM2's shapes with drafts of three methods, with the kernel for up to 16 rows and up to 32 (after a sweep,
in the tiles it found best; with every short part fetched whole, for 16 rows too). `target`: a pass of Qwen3-8B,
likewise. `others`: attention and head at 16 and 17 tokens. `--quick` launches all once and times nothing: it leaves the
kernels in Triton's cache.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import target_gpu
import torch
from device_timing import measured_bandwidth, median_ms, profile, say
from engine_gpu import step_graph
from engine_trained_gpu import random_draft, random_target

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.kernels.attention.block_attention import attention_tiling, block_attention
from draftsmith.kernels.attention.visibility import CachePattern
from draftsmith.kernels.layers import skinny_linear as skinny
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.vocabulary.vocabulary_argmax import vocabulary_argmax

DEVICE, DTYPE = "cuda", torch.bfloat16
ROWS = (1, 8, 16, 17, 24, 32)
# Weights [outputs, inner] of a layer, target's and draft's alike, and the fusion of five taps.
SHAPES = {
    "smollm2": {
        "qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "taps": (576, 2880),
    },
    "qwen3-8b": {
        "qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
        "taps": (4096, 20480),
    },
}  # fmt: skip
ATTENTION = {"smollm2": (9, 3, 64, 30), "qwen3-8b": (32, 8, 128, 36)}  # heads, key heads, dimension, layers
HEAD = {"smollm2": (49152, 576), "qwen3-8b": (151936, 4096)}
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "domino": {
        "architecture": "domino",
        "head": {"gru_hidden_dim": 192, "emb_dim": 128, "pure_draft_prefix_len": 1, "shift_label": True},
    },
    "dspark": {
        "architecture": "dspark",
        "head": {
            "markov_rank": 128, "markov_head_type": "vanilla", "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    },
}  # fmt: skip
# (method, rows, proposals); a verify has one token more.
CYCLES = (
    ("domino", 1, 16), ("dspark", 1, 16), ("dflash", 1, 15), ("domino", 1, 15), ("dspark", 1, 15),
    ("dflash", 2, 15), ("domino", 2, 15), ("dspark", 2, 15),
)  # fmt: skip
# Rows that the kernel takes, and how it reads the weights; `swept` are the best tiles of a sweep in the same run.
WAYS: dict[str, dict[str, Any]] = {
    "16": {"limit": 16}, "32": {"limit": 32}, "32, 1 held": {"limit": 32, "held": 1},
    "32 swept": {"limit": 32, "best": True}, "all whole": {"limit": 32, "held": 5},
}  # fmt: skip
LARGE_WAYS = {name: WAYS[name] for name in ("16", "32")}


def tiles(splits: int, columns: int, depth: int, warps: int, stages: int, held: int = 1) -> Tiling:
    """A tiling of `skinny_linear` for up to 32 rows."""
    return Tiling(32, columns, depth, splits, held=held, warps=warps, stages=stages)


# By inner dimension for SmolLM2, where every part should be whole blocks.
SMALL: dict[int, tuple[Tiling, ...]] = {
    576: tuple(tiles(*t) for t in (
        (1, 64, 64, 4, 5), (3, 64, 64, 4, 3), (3, 64, 64, 4, 3, 3), (3, 64, 64, 2, 3, 3), (9, 64, 64, 4, 2),
        (1, 32, 64, 4, 5), (3, 32, 64, 4, 3), (3, 32, 64, 4, 3, 3), (3, 32, 64, 2, 3, 3),
        (9, 32, 64, 4, 2), (3, 16, 64, 2, 3, 3),
    )),
    1536: tuple(tiles(*t) for t in (
        (4, 64, 128, 4, 3), (4, 64, 128, 4, 3, 3), (6, 64, 128, 4, 3, 2),
        (12, 64, 128, 4, 2), (8, 64, 64, 4, 3), (8, 64, 64, 4, 3, 3), (4, 32, 128, 4, 3, 3), (8, 32, 64, 4, 3, 3),
        (8, 32, 64, 2, 3, 3),
    )),
    2880: tuple(tiles(*t) for t in (
        (9, 64, 64, 4, 3), (9, 64, 64, 4, 3, 5), (15, 64, 64, 4, 3, 3), (9, 32, 64, 4, 3, 5), (15, 32, 64, 2, 3, 3),
    )),
}  # fmt: skip
LARGE = (
    (64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 4), (64, 64, 4, 5), (128, 64, 4, 3), (128, 64, 4, 4),
    (128, 64, 8, 4), (128, 128, 8, 3),
)  # fmt: skip
LARGE_SPLITS = {"qkv": (1, 2, 4), "out": (2, 4), "gate_up": (1, 2), "down": (2, 4), "taps": (4, 8)}


def candidates(model: str, name: str) -> list[Tiling]:
    if model == "smollm2":
        return list(SMALL[SHAPES[model][name][1]])
    return [tiles(splits, *tile) for splits in LARGE_SPLITS[name] for tile in LARGE]


def graph_us(launch: Callable[..., object], operands: Sequence[tuple[torch.Tensor, ...]], quick: bool) -> float:
    """Microseconds of a launch, in a graph of one for each of the operands."""
    if quick:
        launch(*operands[0])
        return 0.0
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(*operands[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensors in operands:
            launch(*tensors)
    graph.replay()
    return round(median_ms(graph.replay, 5, 2) * 1e3 / len(operands), 2)


def rotating(outputs: int, inner: int, quick: bool) -> list[tuple[torch.Tensor]]:
    """As many copies of a weight as the L2 cache does not hold."""
    count = 1 if quick else max(4, -(-(160 << 20) // (2 * outputs * inner)))
    return [((torch.randn(outputs, inner, device=DEVICE) / inner**0.5).to(DTYPE),) for _ in range(count)]


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.models, self.rows, self.quick = arguments.models, arguments.rows, arguments.quick
        self.kernels = arguments.kernels
        self.bandwidth = 1.0 if self.quick else measured_bandwidth()
        self.best: dict[tuple[int, int, int], Tiling] = {}  # by rows, outputs, inner: what a sweep found
        say(part="setup", terabytes_per_second=round(self.bandwidth / 1e12, 3), torch=torch.__version__)

    def shapes(self) -> Iterator[tuple[str, str, int, int]]:
        for model in self.models:
            for name, (outputs, inner) in SHAPES[model].items():
                yield model, name, outputs, inner

    def products(self) -> None:
        for model, name, outputs, inner in self.shapes():
            weights = rotating(outputs, inner, self.quick)
            floor = 2 * outputs * inner / self.bandwidth * 1e6
            for rows in self.rows:
                x = torch.randn(rows, inner, device=DEVICE, dtype=DTYPE)
                ours = graph_us(partial(skinny.skinny_linear, x), weights, self.quick)
                other = graph_us(partial(torch.nn.functional.linear, x), weights, self.quick)
                say(
                    part="product", model=model, name=name, outputs=outputs, inner=inner, rows=rows, us=ours,
                    cublas_us=other, floor_us=round(floor, 2), floor_over_us=round(floor / (ours or 1), 3),
                    floor_over_cublas=round(floor / (other or 1), 3),
                )  # fmt: skip

    def sweep(self) -> None:
        for model, name, outputs, inner in self.shapes():
            weights = rotating(outputs, inner, self.quick)
            for rows in (16, 17, 32) if model == "smollm2" else (17, 32):
                x = torch.randn(rows, inner, device=DEVICE, dtype=DTYPE)
                found = []
                for tiling in candidates(model, name):
                    us = graph_us(partial(skinny.skinny_linear, x, tiling=tiling), weights, self.quick)
                    found.append((us, tiling))
                found.sort()
                self.best[rows, outputs, inner] = found[0][1]
                chosen = graph_us(partial(skinny.skinny_linear, x), weights, self.quick)
                table = " ".join(f"{us}:{'/'.join(map(str, tiling))}" for us, tiling in found)
                say(part="sweep", model=model, name=name, rows=rows, chosen_us=chosen, us_by_tiles=table)

    @contextmanager
    def product_of(self, limit: int, best: bool = False, **options: int) -> Iterator[None]:
        """The kernel takes `limit` rows; with other options, or in the tiles that a sweep found best."""
        rows, kernel = skinny.MAX_ROWS, skinny.skinny_linear

        def tuned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            chosen = skinny.skinny_tiling(x, weight)._replace(**options)
            swept = self.best.get((x.numel() // x.shape[-1], *weight.shape))
            return kernel(x, weight, tiling=swept if best and swept is not None else chosen)

        skinny.MAX_ROWS = limit
        skinny.skinny_linear = tuned  # type: ignore[assignment]
        try:
            yield
        finally:
            skinny.MAX_ROWS, skinny.skinny_linear = rows, kernel

    def cycles(self, cases: tuple[tuple[str, int, int], ...] = CYCLES) -> None:
        target = random_target()
        drafts = {method: random_draft(**METHODS[method]) for method in dict.fromkeys(case[0] for case in cases)}
        for method, batch, proposals in cases:
            runs = {}
            for name, way in WAYS.items():
                with self.product_of(**way):
                    engine = Engine(target, drafts[method], EngineOptions(slots=batch, num_proposals=proposals))
                    runs[name] = step_graph(engine, batch, 512)[0]
            if self.quick:
                continue
            turns = [{name: median_ms(run, 7, 10) for name, run in runs.items()} for _ in range(3)]
            say(
                part="cycle", method=method, batch=batch, proposals=proposals, tokens=batch * (proposals + 1),
                ms={name: [round(turn[name], 4) for turn in turns] for name in runs},
            )  # fmt: skip
            if (method, batch, proposals) == cases[0]:
                for name, run in runs.items():
                    say(part="cycle profile", rows_at_most=name)
                    print(profile(run, 5, self.kernels)[1], flush=True)

    def target(self) -> None:
        if self.quick:
            target_gpu.SHAPES["qwen3-8b"]["num_hidden_layers"] = 2
        target = target_gpu.random_target("qwen3-8b", True)
        for batch, context, width in ((1, 512, 16), (1, 512, 17), (1, 512, 24), (2, 512, 16), (2, 512, 17)):
            found = {}
            for name, way in LARGE_WAYS.items():
                with self.product_of(**way):
                    graph, inputs = target_gpu.captured_step(target, batch, context, width)
                found[name] = round(target_gpu.median_seconds(graph.replay, 1 if self.quick else 20) * 1e3, 3)
                del graph, inputs
            floor = target_gpu.step_bytes(target, batch, context) / self.bandwidth * 1e3
            say(part="target", batch=batch, context=context, width=width, ms=found, floor_ms=round(floor, 3))

    def others(self) -> None:
        for model in self.models:
            vocabulary, inner = HEAD[model]
            heads = rotating(vocabulary, inner, self.quick)
            us = {}
            for rows in (16, 17, 32):
                states = torch.randn(rows, inner, device=DEVICE, dtype=DTYPE)
                us[rows] = graph_us(partial(vocabulary_argmax, states), heads, self.quick)
            floor = 2 * vocabulary * inner / self.bandwidth * 1e6
            say(part="head", model=model, us=us, floor_us=round(floor, 1))
            for batch, context in ((1, 256), (1, 512), (1, 4096), (2, 512)):
                for width in (16, 17):
                    say(
                        part="attention", model=model, batch=batch, context=context, width=width,
                        us=self._attention(model, batch, context, width),
                    )  # fmt: skip

    def _attention(self, model: str, batch: int, context: int, width: int) -> dict[str, float]:
        """By options of the kernel."""
        heads, kv_heads, dim, layers = ATTENTION[model]
        layers = 1 if self.quick else layers
        shape = (2, batch, kv_heads, context, dim)
        caches = [tuple(torch.randn(shape, device=DEVICE, dtype=DTYPE)) for _ in range(layers)]
        q = torch.randn(batch, width, heads, dim, device=DEVICE, dtype=DTYPE).transpose(1, 2)
        positions = (torch.arange(width, device=DEVICE) + context - width).repeat(batch, 1)
        ways: dict[str, dict[str, int]] = {
            "chosen": {}, "splits 8": {"splits": 8}, "splits 16": {"splits": 16}, "splits 32": {"splits": 32},
        }  # fmt: skip
        if width * heads // kv_heads > 64:
            for splits in (8, 16):
                ways[f"tiles of 64, splits {splits}"] = {"rows": 64, "splits": splits, "warps": 4}
        attention = partial(block_attention, q, pattern=CachePattern(positions, causal=True), scale=dim**-0.5)
        chosen = attention_tiling(q, kv_heads)
        return {
            name: graph_us(partial(attention, tiling=chosen._replace(**options)), caches, self.quick)
            for name, options in ways.items()
        }


PARTS = ("products", "sweep", "cycles", "target", "others")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--kernels", type=int, default=14, help="kernels of a profile to print")
    parser.add_argument("--quick", action="store_true", help="launch all once, and time nothing")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    for part in arguments.parts:
        getattr(bench, part)()
    return 0


if __name__ == "__main__":
    sys.exit(main())
