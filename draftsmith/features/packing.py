"""Whole documents into rows of a fixed number of tokens: in which order, which beside which, and as tensors."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.features.batch import PackedBatch
from draftsmith.features.record import Record


def epoch_order(lengths: Sequence[int], seed: int, epoch: int) -> list[int]:
    """The documents in the order of one epoch: a permutation that depends on the seed and the epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist()


def epoch_rows(
    lengths: Sequence[int], tokens_per_row: int, seed: int, epoch: int, names: Sequence[str] | None = None
) -> list[list[int]]:
    """The rows of one epoch: every document once, packed anew and shuffled, the same for every number of processes.

    Which documents share a row, and the order of the rows, change with the epoch. Raises as `pack_rows` does.
    """
    order = epoch_order(lengths, seed, epoch)
    packed = pack_rows(
        [lengths[document] for document in order],
        tokens_per_row,
        None if names is None else [names[document] for document in order],
    )
    rows = [[order[place] for place in row] for row in packed]
    # Packing puts the longest documents into the first rows; training must not see them sorted by length.
    shuffled = np.random.default_rng([seed, epoch, 1]).permutation(len(rows))
    return [rows[number] for number in shuffled]


def pack_rows(lengths: Sequence[int], tokens_per_row: int, names: Sequence[str] | None = None) -> list[list[int]]:
    """Distribute whole documents over rows of at most `tokens_per_row` tokens: lists of indices into `lengths`.

    Best fit, longest first (ties: first come): each document goes into the fullest row that still takes it, so few
    tokens are wasted; deterministic. Raises `DraftsmithError` for a document that is empty or longer than a row
    (`names` names it).
    """
    for document, length in enumerate(lengths):
        if not 1 <= length <= tokens_per_row:
            name = f"document {document}" if names is None else f"sample {names[document]!r}"
            raise DraftsmithError(
                f"{name} has {length} tokens; a row takes 1 to {tokens_per_row}: raise the tokens per row, or cut or "
                "skip long samples when they are tokenised"
            )
    rows: list[list[int]] = []
    rows_by_space: defaultdict[int, list[int]] = defaultdict(list)
    spaces = 0  # bit s is set while some row has exactly s tokens left, so that the tightest fit is the lowest set bit
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = spaces >> lengths[document]
        if fitting:
            space = lengths[document] + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces ^= 1 << space
        else:
            space, row = tokens_per_row, len(rows)
            rows.append([])
        rows[row].append(document)
        rest = space - lengths[document]
        rows_by_space[rest].append(row)
        spaces |= 1 << rest
    return rows


def collate(
    records_by_row: list[list[Record]],
    tokens_per_row: int,
    empty: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
) -> PackedBatch:
    """Lay the records of each row end to end: `PackedBatch` of R = len(records_by_row) rows, S = tokens_per_row.

    The unused tail of a row has token 0, loss mask False, features 0, positions from 0, and counts as one more
    document. empty: (shape, dtype) -> the tensor that a feature's rows are copied into, whatever it holds before (None:
    a new one, beside the records' features).
    Raises `DraftsmithError` for no rows, an empty row, records of different features, or more tokens than a row takes.
    """
    if not records_by_row or not all(records_by_row):
        raise DraftsmithError("a batch needs at least one row, and each row at least one record")
    first = records_by_row[0][0].features
    rows = len(records_by_row)
    input_ids = torch.zeros(rows, tokens_per_row, dtype=torch.int64)
    loss_mask = torch.zeros(rows, tokens_per_row, dtype=torch.bool)
    positions = torch.zeros(rows, tokens_per_row, dtype=torch.int64)
    document = torch.zeros(rows, tokens_per_row, dtype=torch.int64)
    features = {
        name: tensor.new_empty(shape) if empty is None else empty(shape, tensor.dtype)
        for name, tensor in first.items()
        for shape in [(rows, tokens_per_row, tensor.shape[1])]
    }
    for row, records in enumerate(records_by_row):
        total = sum(record.input_ids.shape[0] for record in records)
        if total > tokens_per_row:
            raise DraftsmithError(f"row {row} has {total} tokens; a row takes {tokens_per_row}")
        end = 0
        for number, record in enumerate(records):
            if {name: (t.shape[1], t.dtype) for name, t in record.features.items()} != {
                name: (t.shape[1], t.dtype) for name, t in first.items()
            }:
                raise DraftsmithError(f"sample {record.sample_id!r} has other features than the batch's first sample")
            length = record.input_ids.shape[0]
            start, end = end, end + length
            input_ids[row, start:end] = record.input_ids
            loss_mask[row, start:end] = record.loss_mask
            positions[row, start:end] = torch.arange(length)
            document[row, start:end] = number
            for name, tensor in record.features.items():
                features[name][row, start:end] = tensor
        positions[row, end:] = torch.arange(tokens_per_row - end)
        document[row, end:] = len(records)
        for tensor in features.values():
            tensor[row, end:] = 0
    sample_ids = [[record.sample_id for record in records] for records in records_by_row]
    return PackedBatch(input_ids, loss_mask, positions, document, features, sample_ids)
