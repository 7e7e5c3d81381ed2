"""Evaluation on held-out documents with fixed anchors."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.blocks.blocks import Blocks
from draftsmith.errors import DraftsmithError
from draftsmith.features.packing import pack_rows
from draftsmith.training.batches import BlockSampler, deal
from draftsmith.training.forward import DraftLoss
from draftsmith.training.sums import Averages, Sums

_log = logging.getLogger(__name__)


def split_documents(sample_ids: Sequence[str], eval_share: float) -> tuple[list[int], list[int]]:
    """Indices of (training, held-out) documents: the `eval_share` of them whose ids have the lowest hashes is held out.

    At least one is held out unless the share is 0. The choice depends on the ids alone, and both lists are in the order
    of the ids: in which order they were captured, the seed and the process change nothing. Raises `DraftsmithError`
    where nothing would be left to train on.
    """
    ordered = sorted(range(len(sample_ids)), key=lambda i: sample_ids[i])
    if eval_share == 0:
        return ordered, []
    ranked = sorted(ordered, key=lambda i: hashlib.sha256(sample_ids[i].encode()).digest())
    count = max(1, round(eval_share * len(sample_ids)))
    if count >= len(sample_ids):
        raise DraftsmithError(
            f"train.eval_share is {eval_share} of {len(sample_ids)} documents, which leaves none to train on; "
            "capture more documents or set it to 0"
        )
    held_out = set(ranked[:count])
    return [i for i in ordered if i not in held_out], [i for i in ordered if i in held_out]


class Evaluation:
    """Loss, per-label accuracy and teacher-forced accept length over the held-out documents.

    Rows and anchors are the same every time (epoch 0 of the sampler's seed), so two evaluations differ only by the
    draft; every block is predicted from its anchor on, as in serving, whatever a method shows while training. Only
    whole blocks count, those whose labels are all supervised: how much of a block the target would accept past the end
    of its document nobody knows, and an accept length that took the end for a rejection would lie below that of
    serving.
    documents, lengths and names: the held-out documents' number in the source, tokens and ids.
    """

    def __init__(
        self,
        sampler: BlockSampler,
        documents: list[int],
        lengths: Sequence[int],
        names: Sequence[str],
        *,
        rows_per_forward: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        rows = [[documents[i] for i in row] for row in pack_rows(lengths, sampler.tokens_per_row, names)]
        self._forwards = deal(rows, rows_per_forward, rank, num_ranks)
        self._sampler = replace(sampler, visible_slots=None)

    @torch.no_grad()
    def run(self, loss: DraftLoss, device: torch.device, progress: Tensor, accelerator: Accelerator) -> Averages:
        """Averages over all processes."""
        loss.eval()
        sums = Sums()
        for forward in self._forwards:
            batch = self._sampler.micro_batch(forward, epoch=0)
            batch = replace(batch, blocks=whole_blocks(batch.blocks)).to(device)
            _, _, metrics = loss(batch, progress)
            sums = sums.plus(Sums.of(metrics))
        loss.train()
        averages = sums.over_ranks(accelerator).averages()
        if averages["loss"] is None:
            _log.warning("no held-out document has room for a whole block: there is nothing to evaluate on")
        return averages


def whole_blocks(blocks: Blocks) -> Blocks:
    """The same blocks, without the labels of those of which some label is not supervised."""
    return replace(blocks, label_mask=blocks.label_mask & blocks.label_mask.all(-1, keepdim=True))


def score(averages: Averages, best_by: str) -> float | None:
    """The number by which checkpoints are ranked, higher is better; None where no label was evaluated.

    Raises `DraftsmithError` where the objective reports no such metric.
    """
    if best_by not in averages:
        raise DraftsmithError(f"train.best_by is {best_by!r}; this objective reports {', '.join(sorted(averages))}")
    value = averages[best_by]
    if value is None or isinstance(value, list):
        return None
    return -value if best_by == "loss" else value
