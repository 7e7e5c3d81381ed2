"""Evaluation on held-out documents with fixed anchors."""

import hashlib
import logging
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.features.packing import pack_rows
from draftsmith.training.forward import DraftLoss
from draftsmith.training.micro_batch import BatchMaker
from draftsmith.training.plan import deal
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
    """Loss, accept length and the method's other metrics over the held-out documents.

    Rows and examples are the same every time (epoch 0 of the seed), so two evaluations differ only by the draft. What a
    draft is judged by, as in serving, is the method's to say (`ExampleMaker.held_out`).
    documents: the held-out documents' numbers in the source.
    """

    def __init__(
        self,
        batches: BatchMaker,
        documents: list[int],
        *,
        rows_per_forward: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        source = batches.source
        lengths, names = [source.lengths[i] for i in documents], [source.sample_ids[i] for i in documents]
        rows = [[documents[i] for i in row] for row in pack_rows(lengths, batches.tokens_per_row, names)]
        self._forwards = deal(rows, rows_per_forward, rank, num_ranks)
        self._batches = batches

    @torch.no_grad()
    def run(self, loss: DraftLoss, device: torch.device, progress: Tensor, accelerator: Accelerator) -> Averages:
        """Averages over all processes."""
        loss.eval()
        sums = Sums()
        for forward in self._forwards:
            batch = self._batches.held_out(forward).to(device)
            _, _, metrics = loss(batch, progress)
            sums = sums.plus(Sums.of(metrics))
        loss.train()
        averages = sums.over_ranks(accelerator).averages()
        if averages["loss"] is None:
            _log.warning("no held-out document has room for a whole example: there is nothing to evaluate on")
        return averages


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
