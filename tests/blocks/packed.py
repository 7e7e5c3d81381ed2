"""Small packed batches, laid out by plain loops, beside the documents that they hold."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.blocks.anchors import Anchors, sample_anchors
from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.build import build_blocks
from draftsmith.blocks.layout import BlockLayout

MASK = 60


@dataclass
class Document:
    id: str
    ids: list[int]
    loss_mask: list[bool]


@dataclass
class Batch:
    """Tensors [R, S] as in a packed batch; `rows` are the documents and `starts` their first index in the row."""

    input_ids: Tensor
    loss_mask: Tensor
    positions: Tensor
    document: Tensor
    sample_ids: list[list[str]]
    rows: list[list[Document]]
    starts: list[list[int]]


def random_document(generator: torch.Generator, name: str, length: int, supervised: float = 0.7) -> Document:
    """Ids below the mask token; the loss mask comes in runs, as answers in a conversation do."""
    ids = torch.randint(0, MASK, (length,), generator=generator).tolist()
    turn = torch.rand(length // 4 + 1, generator=generator).lt(supervised).repeat_interleave(4)[:length]
    return Document(name, ids, turn.tolist())


def pack(rows: list[list[Document]], length: int) -> Batch:
    input_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    loss_mask = torch.zeros(len(rows), length, dtype=torch.bool)
    positions, document = input_ids.clone(), input_ids.clone()
    starts = []
    for r, documents in enumerate(rows):
        s, row_starts = 0, []
        for number, each in enumerate(documents):
            row_starts.append(s)
            for p, (token, supervised) in enumerate(zip(each.ids, each.loss_mask, strict=True)):
                input_ids[r, s], loss_mask[r, s], positions[r, s], document[r, s] = token, supervised, p, number
                s += 1
        assert s <= length
        document[r, s:] = len(documents)
        positions[r, s:] = torch.arange(length - s)
        starts.append(row_starts)
    return Batch(input_ids, loss_mask, positions, document, [[d.id for d in row] for row in rows], rows, starts)


def ragged_batch(seed: int = 0) -> Batch:
    """Three rows: several documents with a tail, one that fills its row, and one whose documents have no candidate but
    for a last one of exactly one."""
    generator = torch.Generator().manual_seed(seed)
    single = Document("single", [5, 6, 7], [False, True, True])
    rows = [
        [random_document(generator, f"a{i}", n) for i, n in enumerate((9, 1, 13, 2))],
        [random_document(generator, "b", 29)],
        [Document("none", [1, 2, 3, 4], [False] * 4), Document("one", [9], [True]), single],
    ]
    return pack(rows, 29)


def anchors_of(batch: Batch, layout: BlockLayout, num_anchors: int = 5, **options: object) -> Anchors:
    settings: dict = {"seed": 3, "epoch": 0, "bucket": 4} | options
    return sample_anchors(batch.loss_mask, batch.document, batch.sample_ids, layout, num_anchors, **settings)


def blocks_of(batch: Batch, layout: BlockLayout, anchors: Anchors) -> Blocks:
    return build_blocks(
        batch.input_ids, batch.loss_mask, batch.positions, batch.document, anchors, layout, mask_token_id=MASK
    )


def owner(batch: Batch, row: int, index: int) -> tuple[Document, int] | None:
    """The document at `index` of `row`, and the position in it; None on the tail."""
    for document, start in zip(batch.rows[row], batch.starts[row], strict=True):
        if start <= index < start + len(document.ids):
            return document, index - start
    return None
