"""Whole documents into rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.errors import DraftsmithError
from draftsmith.features.packing import collate, epoch_order, epoch_rows, pack_rows

from . import stores

LENGTHS = st.lists(st.integers(1, 64), max_size=60)


def best_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Best fit, longest first, by looking at every row: the plain form of `pack_rows`."""
    rows: list[list[int]] = []
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        spaces = [size - sum(lengths[other] for other in row) - lengths[document] for row in rows]
        fitting = [(space, number) for number, space in enumerate(spaces) if space >= 0]
        if fitting:
            rows[min(fitting)[1]].append(document)
        else:
            rows.append([document])
    return rows


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS)
def test_packing_is_best_fit(lengths: list[int]) -> None:
    rows = pack_rows(lengths, 64)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    fill = [sum(lengths[document] for document in row) for row in rows]
    assert max(fill, default=0) <= 64
    # Rows with equal room are interchangeable, so only what the rows are filled with is compared.
    assert sorted(fill) == sorted(sum(lengths[i] for i in row) for row in best_fit(lengths, 64))
    assert rows == pack_rows(lengths, 64)


def test_rows_are_filled_well() -> None:
    lengths = np.random.default_rng(7).integers(20, 1500, size=500).tolist()
    rows = pack_rows(lengths, 3072)
    assert sum(lengths) / (len(rows) * 3072) > 0.97


def test_a_document_that_fits_no_row_is_named() -> None:
    with pytest.raises(DraftsmithError, match="sample 'long' has 9 tokens; a row takes 1 to 8"):
        pack_rows([8, 9], 8, ["short", "long"])
    with pytest.raises(DraftsmithError, match="document 1 has 0 tokens"):
        pack_rows([8, 0], 8)
    with pytest.raises(DraftsmithError, match="sample 'long' has 9 tokens"):
        epoch_rows([8, 9], 8, seed=0, epoch=0, names=["short", "long"])
    assert pack_rows([], 8) == []


def test_epochs_differ_and_repeat_themselves() -> None:
    lengths = np.random.default_rng(1).integers(1, 30, size=80).tolist()
    order = epoch_order(lengths, seed=5, epoch=0)
    assert sorted(order) == list(range(80))
    assert order == epoch_order(lengths, seed=5, epoch=0)
    assert order != epoch_order(lengths, seed=5, epoch=1)
    assert order != epoch_order(lengths, seed=6, epoch=0)

    rows = epoch_rows(lengths, 32, seed=5, epoch=0)
    assert sorted(document for row in rows for document in row) == list(range(80))
    assert rows == epoch_rows(lengths, 32, seed=5, epoch=0)
    assert rows != epoch_rows(lengths, 32, seed=5, epoch=1)
    longest = [max(lengths[document] for document in row) for row in rows]
    assert longest != sorted(longest, reverse=True)


def test_collate_lays_documents_end_to_end() -> None:
    layout = stores.layout()
    a, b, c = stores.records([3, 4, 5], layout)
    batch = collate([[a, b], [c]], 9)
    assert batch.input_ids.shape == (2, 9)
    assert batch.input_ids.dtype == torch.int64
    assert torch.equal(batch.input_ids[0], torch.cat([a.input_ids, b.input_ids, torch.zeros(2, dtype=torch.int64)]))
    assert torch.equal(batch.loss_mask[0], torch.cat([a.loss_mask, b.loss_mask, torch.zeros(2, dtype=torch.bool)]))
    assert not batch.loss_mask[1, 5:].any()
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert batch.document.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 1, 1, 1, 1]]
    for name, width in layout.widths.items():
        tensor = batch.features[name]
        assert tensor.shape == (2, 9, width)
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor[0, 3:7], b.features[name])
        assert torch.equal(tensor[1, :5], c.features[name])
        assert not tensor[1, 5:].any()
    assert batch.sample_ids == [[a.sample_id, b.sample_id], [c.sample_id]]


def test_a_full_row_has_no_tail() -> None:
    a, b = stores.records([3, 4], stores.layout())
    batch = collate([[a, b]], 7)
    assert batch.document.tolist() == [[0, 0, 0, 1, 1, 1, 1]]


def test_collate_refuses_what_does_not_fit() -> None:
    a, b = stores.records([3, 4], stores.layout())
    with pytest.raises(DraftsmithError, match="row 0 has 7 tokens; a row takes 6"):
        collate([[a, b]], 6)
    with pytest.raises(DraftsmithError, match="at least one row"):
        collate([], 6)
    with pytest.raises(DraftsmithError, match="at least one record"):
        collate([[a], []], 6)
    narrow = replace(b, features={"taps": b.features["taps"]})
    with pytest.raises(DraftsmithError, match="other features"):
        collate([[a, narrow]], 7)


def test_memory_that_is_given_need_not_be_clean() -> None:
    layout = stores.layout()
    a, b, c = stores.records([3, 4, 5], layout)
    plain = collate([[a, b], [c]], 9)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = []

    def dirty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        shapes.append((shape, dtype))
        return torch.full(shape, torch.nan, dtype=dtype)

    filled = collate([[a, b], [c]], 9, dirty)
    assert shapes == [((2, 9, width), torch.bfloat16) for width in layout.widths.values()]
    assert filled.features.keys() == plain.features.keys()
    for name, tensor in plain.features.items():
        assert torch.equal(filled.features[name], tensor)
        assert not filled.features[name][0, 7:].any()
        assert filled.features[name][0, 3:7].equal(b.features[name])
