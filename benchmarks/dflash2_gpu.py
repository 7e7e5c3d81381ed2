"""What DFlash 2 adds to a decoding cycle beside DFlash, on one GPU: convolutions, candidates, the path through them.

    python benchmarks/dflash2_gpu.py kernels cycle

Random weights at SmolLM2-135M's shapes (a head of published sizes), bf16, everything replayed from CUDA graphs.
`kernels`: each kernel against its PyTorch operations, by rows of the batch. `cycle`: whole steps of the engine, also
with the parts as PyTorch operations, and a profile. Prints one JSON line a measurement.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from device_timing import draw_weights, median_ms, profile, say
from engine_gpu import step_graph
from engine_trained_gpu import random_draft, random_target
from few_rows_gpu import graph_us
from torch import Tensor

from draftsmith.algorithms.block_drafter import BlockDrafter
from draftsmith.algorithms.dflash2_path import DFlash2Filler, draw_path
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.convolution import convolve
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.runner import FusedBlocks
from draftsmith.kernels.layers.block_convolution import block_convolution
from draftsmith.kernels.rollout.candidate_path import candidate_path, top_candidates

DEVICE, DTYPE = "cuda", torch.bfloat16
HEAD = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
PARTS = ("kernels", "cycle")


def by_operations(
    hidden: Tensor, base: Tensor, deltas: Tensor, *, which: int, partial: bool = False, partial_deltas: bool = False
) -> Tensor:
    """`block_convolution` in PyTorch."""
    hidden = hidden.sum(0).to(base.dtype) if partial else hidden
    deltas = deltas.sum(0).to(base.dtype) if partial_deltas else deltas
    return convolve(hidden, base[which], deltas.unflatten(-1, (2, base.shape[1], -1))[..., which, :, :])


def dflash2_draft() -> Draft:
    draft = random_draft(architecture="dflash2", head=HEAD)
    draw_weights(draft.head.candidate_selector)
    return draft


@torch.no_grad()
def kernels(batch: int, draft: Draft) -> None:
    selector = draft.head.candidate_selector
    slots, vocab, rank = 15, draft.config.vocab_size, HEAD["selector_rank"]

    def compare(name: str, operands: Callable[[], tuple[Tensor, ...]], **ways: Callable[..., object]) -> None:
        inputs = [operands() for _ in range(8)]
        say(
            part="kernel", kernel=name, batch=batch, us={key: graph_us(way, inputs, False) for key, way in ways.items()}
        )

    def drawn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=dtype)

    groups = draft.config.hidden_size // HEAD["conv_group_size"]
    base = drawn(2, 2, draft.config.hidden_size)
    compare(
        "convolution of a whole input",
        lambda: (drawn(batch, 16, base.shape[-1]), base, drawn(batch, 16, 4 * groups)),
        kernel=lambda *given: block_convolution(*given, which=0),
        operations=lambda *given: by_operations(*given, which=0),
    )
    both: dict[str, Any] = {"which": 1, "partial": True, "partial_deltas": True}
    compare(
        "convolution of three addends",
        lambda: (
            drawn(3, batch, 16, base.shape[-1], dtype=torch.float32), base,
            drawn(3, batch, 16, 4 * groups, dtype=torch.float32),
        ),
        kernel=lambda *given: block_convolution(*given, **both),
        operations=lambda *given: by_operations(*given, **both),
    )  # fmt: skip
    compare(
        "candidates",
        lambda: (drawn(batch, slots, vocab),),
        kernel=lambda logits: top_candidates(logits, selector.top_k),
        topk=selector.candidates,
    )

    def for_path() -> tuple[Tensor, ...]:
        unary, states = drawn(batch, slots, vocab), drawn(batch, slots, draft.config.hidden_size)
        anchors = torch.randint(vocab, (batch,), device=DEVICE)
        return states, unary, anchors, top_candidates(unary, selector.top_k), drawn(batch, slots, rank)

    tables = selector.predecessor_codebook, selector.successor_codebook
    rows = torch.arange(batch, device=DEVICE)
    sampler = RowSampler(SamplingOptions(), rows, rows)
    compare(
        "path",
        for_path,
        kernel=lambda _, __, anchors, found, projected: candidate_path(found, anchors, projected, *tables),
        operations_with_candidates=lambda states, unary, anchors, *_: draw_path(
            selector, states, unary, anchors, sampler
        ),
    )


def cycles(batches: list[int], rows: int) -> None:
    target, dflash, dflash2 = random_target(), random_draft(), dflash2_draft()
    for batch in batches:
        runs: dict[str, Callable[[], None]] = {}

        def add(name: str, draft: Draft, batch: int = batch, runs: dict[str, Any] = runs, **parts: bool) -> None:
            engine = Engine(target, draft, EngineOptions(slots=batch, num_proposals=15))
            drafter = engine.drafter
            assert isinstance(drafter, BlockDrafter)
            assert isinstance(drafter.runner, FusedBlocks)
            if parts.get("path"):
                drafter.filler = DFlash2Filler(draft, target.ends, drafter.layout, 15)
            if parts.get("convolution"):
                drafter.runner.fused._block_convolution = by_operations
            runs[name] = step_graph(engine, batch, 512)[0]

        add("dflash", dflash)
        add("dflash2", dflash2)
        add("dflash2, path by operations", dflash2, path=True)
        add("dflash2, convolutions by operations", dflash2, convolution=True)
        add("dflash2, both by operations", dflash2, path=True, convolution=True)
        turns = [{name: median_ms(run, 7, 10) for name, run in runs.items()} for _ in range(3)]
        say(
            part="cycle",
            batch=batch,
            proposals=15,
            ms={name: [round(turn[name], 4) for turn in turns] for name in runs},
        )
        if batch == batches[0]:
            for name in ("dflash2", "dflash2, both by operations"):
                idle, table = profile(runs[name], 5, rows)
                say(part="cycle profile", way=name, idle=round(idle, 3))
                print(table, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--kernels", type=int, default=24, help="kernels of a profile to print")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    say(part="setup", device=torch.cuda.get_device_name(), torch=torch.__version__)
    if "cycle" in arguments.parts:
        cycles(arguments.batches, arguments.kernels)
    if "kernels" in arguments.parts:
        draft = dflash2_draft()
        for batch in arguments.batches:
            kernels(batch, draft)
    return 0


if __name__ == "__main__":
    sys.exit(main())
