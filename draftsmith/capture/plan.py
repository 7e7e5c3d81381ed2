"""The work of a capture before it starts: its batches, its size, and what an earlier run has already done."""

import heapq
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.base.readable import readable_bytes
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import finished_shards
from draftsmith.features.tables import SAMPLE_BYTES, TOKEN_BYTES, ShardTokens


@dataclass(frozen=True)
class SizeEstimate:
    """What a capture is going to store, and the room there is for it."""

    samples: int
    tokens: int
    bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples, {self.tokens:,} tokens: {readable_bytes(self.bytes)} to be written, "
            f"{readable_bytes(self.free_bytes)} free"
        )


def estimate_size(samples: Sequence[Sample], layout: CaptureLayout, directory: Path | str) -> SizeEstimate:
    """The bytes that `samples` take in a store of `layout`, and the free bytes where `directory` lies or will lie."""
    return estimate_of(len(samples), sum(sample.input_ids.shape[0] for sample in samples), layout, directory)


def estimate_of(samples: int, tokens: int, layout: CaptureLayout, directory: Path | str) -> SizeEstimate:
    """As `estimate_size`, of counts alone."""
    size = tokens * (layout.bytes_per_token + TOKEN_BYTES) + samples * SAMPLE_BYTES
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    return SizeEstimate(samples, tokens, size, shutil.disk_usage(place).free)


def plan_batches(samples: Sequence[Sample], tokens_per_batch: int) -> list[list[Sample]]:
    """Group samples of like length, longest first; a batch padded to its longest has at most `tokens_per_batch` tokens.

    The batches depend on the samples alone, not on what is already done: a sample is always computed beside the same
    neighbours, and a resumed capture therefore gives the very bits of an uninterrupted one.
    """
    batches: list[list[Sample]] = []
    width = 0
    for sample in sorted(samples, key=lambda sample: -sample.input_ids.shape[0]):
        if batches and (len(batches[-1]) + 1) * width <= tokens_per_batch:
            batches[-1].append(sample)
        else:
            batches.append([sample])
            width = sample.input_ids.shape[0]
    return batches


def share_batches(batches: Sequence[Sequence[Sample]], count: int) -> list[list[Sequence[Sample]]]:
    """Distribute whole batches over `count` processes so that each computes about as many tokens, padding included.

    Longest first to the process with the least; so the shares differ by at most one batch, and some may be empty. A
    sample's batch, and with it every bit of its features, is the same for every number of processes.
    """
    shares: list[list[Sequence[Sample]]] = [[] for _ in range(count)]
    loads = [(0, rank) for rank in range(count)]
    for batch in sorted(batches, key=lambda batch: -padded_tokens(batch)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(batch)
        heapq.heappush(loads, (load + padded_tokens(batch), rank))
    return shares


def padded_tokens(batch: Sequence[Sample]) -> int:
    """The tokens of a batch in which every sample is padded to the longest."""
    return len(batch) * max(sample.input_ids.shape[0] for sample in batch)


def finished_samples(directory: Path, samples: Sequence[Sample]) -> set[str]:
    """The ids of `samples` that the store in `directory` already holds.

    Raises `DraftsmithError` where it holds a sample that is not among them, or one with other tokens or another loss
    mask: then the data has changed since, and the store would be a mixture of both. (Of samples with the same id the
    first counts.)
    """
    wanted = {sample.id: sample for sample in reversed(samples)}
    finished: set[str] = set()
    for sample_id, loss_mask in same_documents(directory, wanted):
        if not torch.equal(loss_mask, wanted[sample_id].loss_mask):
            raise DraftsmithError(
                f"{directory} holds sample {sample_id!r} with another loss mask: the data, or how it is tokenised, has "
                f"changed since; `draftsmith capture --remask` writes the new masks, or delete {directory}"
            )
        finished.add(sample_id)
    return finished


def same_documents(directory: Path, wanted: Mapping[str, Sample]) -> Iterator[tuple[str, Tensor]]:
    """The documents in the finished shards of `directory`: id and stored loss mask bool [S].

    Raises `DraftsmithError` where one is not in `wanted` (by id), or has other tokens there.
    """
    advice = f"the data has changed since; capture into another directory, or delete {directory}"
    for stored in stored_documents(directory):
        if stored.id not in wanted:
            raise DraftsmithError(f"{directory} holds sample {stored.id!r}, which is not in the data: {advice}")
        if not torch.equal(stored.input_ids, wanted[stored.id].input_ids):
            raise DraftsmithError(f"{directory} holds sample {stored.id!r} with other tokens: {advice}")
        yield stored.id, stored.loss_mask


def stored_documents(directory: Path) -> Iterator[Sample]:
    """Ids, tokens and loss masks of the documents in the finished shards of `directory`."""
    for shard in finished_shards(directory):
        tokens = ShardTokens.read(directory / shard.entry.tokens_file.name)
        input_ids, loss_mask = tokens.input_ids.split(tokens.lengths), tokens.loss_mask.split(tokens.lengths)
        for sample_id, ids, mask in zip(tokens.sample_ids, input_ids, loss_mask, strict=True):
            yield Sample(sample_id, ids.to(torch.int64), mask.to(torch.bool))
