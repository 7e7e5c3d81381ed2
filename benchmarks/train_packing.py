"""Documents a second of packed rows, and of batches padded to their longest document.

    python benchmarks/train_packing.py packed:16:graphs padded:16:graphs theirs:16

A part is `WAY:DOCUMENTS[:OPTION...]`, measured as `train_gpu.py` measures (`--lock FILE` too). Ways:

    packed      this trainer on rows of 3,584 tokens, out of an epoch of 1,024 documents packed as training packs them:
                as many rows as about DOCUMENTS take
    padded      this trainer with a row for every document, as long as the longest; slots without a label go through the
                layers, not through the output head. Beside it, `whole`: the same where every slot has a label, which is
                what padding costs a trainer that leaves no slot out of the head
    theirs      SpecForge's step on the padded batch (options as in `train_gpu.py`)

Options: `qwen3-8b`, its shapes instead of SmolLM2's; `graphs`; `eager`; `checkpointing`. Lengths are spread like those
of gsm8k's answers, mean 210 tokens and at most 448, at even quantiles: as many of every length as there are in the long
run. Every position that may be an anchor is one.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from train_gpu import SHAPES, Shape, main, micro_batch, our_step, random_records, their_batch, their_step
from train_timing import measured

from draftsmith.features.packing import epoch_rows

TOKENS_PER_ROW = 3584
EPOCH = 1024
MOST_ANCHORS = 512


def lengths(count: int) -> list[int]:
    drawn = 40 + torch.distributions.Gamma(4.0, 4.0 / 170.0).sample((1 << 14,))
    return drawn.quantile((torch.arange(count) + 0.5) / count).long().clamp(max=448).tolist()


def shape_of(options: Sequence[str], tokens_per_row: int) -> Shape:
    base = SHAPES["qwen3-8b" if "qwen3-8b" in options else "smollm2"]
    return replace(base, anchors=MOST_ANCHORS, tokens_per_row=tokens_per_row)


class Ours:
    """This trainer's step, on rows of documents of given lengths."""

    def __init__(self, tokens_per_row: int, options: Sequence[str]) -> None:
        self.shape, self.options = shape_of(options, tokens_per_row), options
        self.step, self.method, self.section = our_step(self.shape, "dflash", options)

    def measured(self, rows: list[list[int]]) -> dict[str, Any]:
        records = [random_records(self.shape, row, final_state=False) for row in rows]
        batch = micro_batch(self.shape, self.method, records, self.section)
        blocks, context = batch.examples, batch.packed.input_ids.numel()
        found = {"rows": len(rows), "context": context, "slots": blocks.input_ids.numel(), "labels": blocks.max_labels}
        return found | measured(lambda: self.step(batch), 12, self.options)


def per_second(found: dict[str, Any], tokens: int, mean: float) -> dict[str, Any]:
    """Documents a second, of the mean length."""
    rate = found["steps_per_s"] * tokens / mean
    return {"mean_tokens": round(mean, 1), "tokens": tokens} | found | {"documents_per_s": round(rate, 1)}


def packed(options: Sequence[str]) -> dict[str, Any]:
    of_epoch = lengths(EPOCH)
    mean = sum(of_epoch) / EPOCH
    count = max(1, round(int(options[0]) * mean / TOKENS_PER_ROW))
    rows = [[of_epoch[i] for i in row] for row in epoch_rows(of_epoch, TOKENS_PER_ROW, seed=0, epoch=0)[:count]]
    return per_second(Ours(TOKENS_PER_ROW, options).measured(rows), sum(map(sum, rows)), mean)


def padded(options: Sequence[str]) -> dict[str, Any]:
    documents = lengths(int(options[0]))
    width, tokens, mean = max(documents), sum(documents), sum(documents) / len(documents)
    trainer = Ours(width, options)
    found = per_second(trainer.measured([[length] for length in documents]), tokens, mean)
    return found | {"whole": per_second(trainer.measured([[width]] * len(documents)), tokens, mean)}


def theirs(options: Sequence[str]) -> dict[str, Any]:
    documents = lengths(int(options[0]))
    shape = shape_of(options, max(documents))
    place = torch.arange(max(documents), device="cuda")
    batch = their_batch(shape, torch.stack([place < length for length in documents]).float())
    step = their_step(shape, options)
    found = measured(lambda: step(*batch), 6, options)
    return per_second(found, sum(documents), sum(documents) / len(documents))


if __name__ == "__main__":
    main(sys.argv[1:], {"packed": packed, "padded": padded, "theirs": theirs})
