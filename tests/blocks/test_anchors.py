from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.blocks.anchors import anchor_candidates, sample_anchors
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.errors import DraftsmithError
from tests.blocks.packed import Batch, Document, anchors_of, owner, pack, ragged_batch, random_document

LAYOUTS = [BlockLayout(kind, 5) for kind in BlockKind]


def drawn(batch: Batch, layout: BlockLayout, num_anchors: int, **options: object) -> dict[str, list[int]]:
    """Document id -> positions of its anchors, in the order of the row."""
    anchors = anchors_of(batch, layout, num_anchors, **options)
    found: dict[str, list[int]] = {document.id: [] for row in batch.rows for document in row}
    for row in range(len(batch.rows)):
        for index, valid in zip(anchors.index[row].tolist(), anchors.valid[row].tolist(), strict=True):
            if valid:
                place = owner(batch, row, index)
                assert place is not None
                found[place[0].id].append(place[1])
    return found


def possible(document: Document) -> list[int]:
    mask = document.loss_mask
    return [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_candidates_are_as_defined(layout: BlockLayout) -> None:
    batch = ragged_batch(1)
    candidates = anchor_candidates(batch.loss_mask, batch.document, layout)
    for row in range(3):
        for index in range(29):
            place = owner(batch, row, index)
            assert candidates[row, index].item() == (place is not None and place[1] in possible(place[0]))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_every_document_gets_its_own_budget(seed: int, num_anchors: int) -> None:
    batch = ragged_batch(seed)
    for name, positions in drawn(batch, LAYOUTS[0], num_anchors).items():
        (document,) = [d for row in batch.rows for d in row if d.id == name]
        assert len(positions) == min(num_anchors, len(possible(document)))  # neither one less nor shared with the row
        assert positions == sorted(set(positions))
        assert set(positions) <= set(possible(document))


def test_one_candidate_is_kept_and_none_is_allowed() -> None:
    found = drawn(ragged_batch(), LAYOUTS[0], 7)
    assert found["single"] == [1]
    assert found["none"] == found["one"] == []


def test_a_batch_without_any_candidate_has_blocks_that_only_fill_the_shape() -> None:
    batch = pack([[Document("none", [1, 2, 3], [False] * 3)]], 6)
    anchors = anchors_of(batch, LAYOUTS[0])
    assert anchors.index.shape == (1, 4)
    assert not anchors.valid.any()


def test_anchors_do_not_depend_on_where_a_document_lies() -> None:
    generator = torch.Generator().manual_seed(5)
    documents = [random_document(generator, f"d{i}", 15 + i) for i in range(6)]
    together = drawn(pack([documents[:3], documents[3:]], 70), LAYOUTS[0], 4)
    alone: dict[str, list[int]] = {}
    for document in reversed(documents):
        alone |= drawn(pack([[document]], 25), LAYOUTS[0], 4)
    assert together == alone
    assert drawn(pack([documents[:3], documents[3:]], 70), LAYOUTS[0], 4) == together  # and are the same every time


@pytest.mark.parametrize("change", [{"seed": 4}, {"epoch": 1}])
def test_seed_and_epoch_change_the_draw(change: dict[str, int]) -> None:
    batch = pack([[random_document(torch.Generator().manual_seed(2), "d", 60, supervised=1.0)]], 60)
    assert drawn(batch, LAYOUTS[0], 10) != drawn(batch, LAYOUTS[0], 10, **change)


def test_documents_of_equal_length_draw_different_anchors() -> None:
    documents = [Document(name, list(range(50)), [True] * 50) for name in "xy"]
    found = drawn(pack([documents], 100), LAYOUTS[0], 10)
    assert found["x"] != found["y"]


def test_the_draw_is_uniform() -> None:
    batch = pack([[Document("d", list(range(11)), [True] * 11)]], 11)
    counts = Counter(a for epoch in range(2000) for a in drawn(batch, LAYOUTS[0], 3, epoch=epoch)["d"])
    assert set(counts) == set(range(10))
    assert all(abs(count - 600) < 5 * (600 * 0.7) ** 0.5 for count in counts.values())  # 3 of 10, 2,000 times


@pytest.mark.parametrize("bucket", [1, 3, 32])
def test_blocks_are_counted_in_whole_buckets(bucket: int) -> None:
    anchors = anchors_of(ragged_batch(), LAYOUTS[0], 50, bucket=bucket)
    most = int(anchors.valid.sum(1).max())
    assert anchors.index.shape[1] == -(-most // bucket) * bucket
    assert anchors.index.shape == anchors.valid.shape == anchors.visible.shape


def test_visible_slots_are_drawn_with_the_documents_own_randomness() -> None:
    def draw(generator: np.random.Generator, count: int) -> np.ndarray:
        return generator.integers(1, 5, count)

    generator = torch.Generator().manual_seed(5)
    documents = [random_document(generator, f"d{i}", 20, supervised=1.0) for i in range(2)]
    together = anchors_of(pack([documents], 40), LAYOUTS[0], 6, visible_slots=draw)
    second = anchors_of(pack([documents[1:]], 20), LAYOUTS[0], 6, visible_slots=draw)
    assert torch.equal(together.visible[0, 6:12], second.visible[0, :6])
    assert together.visible[0, :12].unique().numel() > 1
    plain = anchors_of(pack([documents], 40), LAYOUTS[0], 6)
    assert torch.equal(plain.index, together.index)
    assert (plain.visible == 1).all()


@pytest.mark.parametrize("num_anchors", [0, -1, True, 2.0])
def test_a_budget_that_is_none_is_refused(num_anchors: object) -> None:
    batch = ragged_batch()
    with pytest.raises(DraftsmithError, match="num_anchors is"):
        sample_anchors(batch.loss_mask, batch.document, batch.sample_ids, LAYOUTS[0], num_anchors, seed=0, epoch=0)  # type: ignore[arg-type]
