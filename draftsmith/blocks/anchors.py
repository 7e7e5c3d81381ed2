"""Where the training blocks of a packed batch begin."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.blocks.layout import BlockLayout
from draftsmith.errors import DraftsmithError

VisibleSlots = Callable[[np.random.Generator, int], np.ndarray]
"""(generator, number of blocks) -> int64 counts of leading slots that carry their real tokens."""


@dataclass(frozen=True)
class Anchors:
    """index [R, N] int64, each anchor's index in its row, ascending in a row; valid [R, N] bool, False where an entry
    only fills the shape (its index is 0 and means nothing); visible [R, N] int64, how many leading slots of the block
    carry their real tokens (1: the anchor alone)."""

    index: Tensor
    valid: Tensor
    visible: Tensor


def anchor_candidates(loss_mask: Tensor, document: Tensor, layout: BlockLayout) -> Tensor:
    """Which tokens may be anchors: the token and its first label are both supervised and of one document.

    loss_mask [R, S] bool, document [R, S] int64 -> [R, S] bool.
    """
    tokens = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    first_label = layout.label_positions(tokens)[:, 0]  # [S]
    in_row = first_label < loss_mask.shape[1]
    first_label = first_label.clamp_max(loss_mask.shape[1] - 1)
    same_document = document == document[:, first_label]
    return loss_mask & loss_mask[:, first_label] & same_document & in_row


def document_generator(seed: int, epoch: int, sample_id: str) -> np.random.Generator:
    """A document's own stream of randomness: the same on whatever rank, in whatever batch the document lands."""
    digest = hashlib.blake2b(f"{seed}\0{epoch}\0{sample_id}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def sample_anchors(
    loss_mask: Tensor,
    document: Tensor,
    sample_ids: Sequence[Sequence[str]],
    layout: BlockLayout,
    num_anchors: int,
    *,
    seed: int,
    epoch: int,
    visible_slots: VisibleSlots | None = None,
    bucket: int = 32,
) -> Anchors:
    """Up to `num_anchors` anchors of every document, uniformly without replacement among its candidates.

    loss_mask [R, S] bool and document [R, S] int64 as in a packed batch (on the CPU), sample_ids: per row, the ids of
    its documents 0, 1, ...; visible_slots draws how much of each block is visible (None: the anchor alone). A document
    with fewer candidates keeps them all; one without any adds no block. N, the same for every row, is the largest row's
    count rounded up to a multiple of `bucket` (and at least one bucket), so that shapes repeat between batches.
    """
    for name, value in (("num_anchors", num_anchors), ("bucket", bucket)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DraftsmithError(f"{name} is {value!r}; it needs an integer of at least 1")
    candidates = anchor_candidates(loss_mask, document, layout).numpy()
    documents = document.numpy()
    rows: list[np.ndarray] = []
    visible_rows: list[np.ndarray] = []
    for row, ids in enumerate(sample_ids):
        found: list[np.ndarray] = [np.empty(0, np.int64)]
        visible: list[np.ndarray] = [np.empty(0, np.int64)]
        for number, sample_id in enumerate(ids):
            possible = np.flatnonzero(candidates[row] & (documents[row] == number))
            generator = document_generator(seed, epoch, sample_id)
            chosen = generator.choice(len(possible), min(num_anchors, len(possible)), replace=False, shuffle=False)
            found.append(possible[np.sort(chosen)])
            count = len(chosen)
            visible.append(np.ones(count, np.int64) if visible_slots is None else visible_slots(generator, count))
        rows.append(np.concatenate(found))
        visible_rows.append(np.concatenate(visible))
    return _pad(rows, visible_rows, bucket)


def _pad(rows: list[np.ndarray], visible_rows: list[np.ndarray], bucket: int) -> Anchors:
    width = max(1, -(-max(map(len, rows)) // bucket)) * bucket
    index = np.zeros((len(rows), width), np.int64)
    valid = np.zeros((len(rows), width), bool)
    visible = np.ones((len(rows), width), np.int64)
    for row, (found, counts) in enumerate(zip(rows, visible_rows, strict=True)):
        index[row, : len(found)] = found
        valid[row, : len(found)] = True
        visible[row, : len(found)] = counts
    return Anchors(torch.from_numpy(index), torch.from_numpy(valid), torch.from_numpy(visible))
