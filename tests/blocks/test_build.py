from dataclasses import fields

import numpy as np
import pytest
import torch

from draftsmith.blocks.build import anchor_block_inputs
from draftsmith.blocks.layout import BlockKind, BlockLayout
from tests.blocks.packed import MASK, anchors_of, blocks_of, owner, ragged_batch
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

LAYOUTS = [BlockLayout(kind, size) for kind in BlockKind for size in (2, 5, 16)]


def some_visible(generator: np.random.Generator, count: int) -> np.ndarray:
    return generator.integers(1, 5, count)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("visible_slots", [None, some_visible])
def test_blocks_are_as_defined(layout: BlockLayout, visible_slots: object) -> None:
    if layout.block_size == 2 and visible_slots is not None:
        pytest.skip("a block of two slots has no room for a longer prefix")
    batch = ragged_batch(4)
    anchors = anchors_of(batch, layout, visible_slots=visible_slots)
    blocks = blocks_of(batch, layout, anchors)
    cut = 0
    for row, n in anchors.valid.nonzero().tolist():
        index, visible = int(anchors.index[row, n]), int(anchors.visible[row, n])
        place = owner(batch, row, index)
        assert place is not None
        document, a = place
        length = len(document.ids)

        assert blocks.positions[row, n].tolist() == [a + k for k in range(layout.block_size)]
        reads = [document.ids[a + k] if k < visible and a + k < length else MASK for k in range(layout.block_size)]
        assert blocks.input_ids[row, n].tolist() == reads
        assert blocks.first_label[row, n] == visible - 1
        for j in range(layout.num_labels):
            p = a + 1 + j
            counts = p < length and document.loss_mask[p] and j >= visible - 1
            assert blocks.label_mask[row, n, j].item() == counts
            if p < length:
                assert blocks.labels[row, n, j] == document.ids[p]
                assert blocks.previous_ids[row, n, j] == document.ids[p - 1]
                assert blocks.label_index[row, n, j] == index + 1 + j
            cut += p >= length
    assert cut > 0 or layout.block_size == 2  # some labels did fall past the end of their document
    assert not blocks.label_mask[~anchors.valid].any()


def test_blocks_of_which_only_the_anchor_is_known_read_the_same_everywhere() -> None:
    """In training, and wherever a draft is asked to propose."""
    target = tiny_target("gemma3", num_layers=2)
    config = tiny_draft(target, block_size=5, mask_token_id=MASK).config
    layout, batch = BlockLayout(BlockKind.ANCHOR_KNOWN, 5), ragged_batch(4)
    anchors = anchors_of(batch, layout)
    anchor_ids = batch.input_ids.gather(1, anchors.index)
    trained = blocks_of(batch, layout, anchors).input_ids.flatten(0, 1)
    embeddings = anchor_block_inputs(anchor_ids.flatten(), config.block, target.ends)
    assert torch.equal(embeddings, target.ends.embedding_weight[trained])
    assert not torch.equal(embeddings, target.ends.embed(trained)), "drafts scale by themselves"
    assert not torch.equal(embeddings, anchor_block_inputs(anchor_ids.flatten().flip(0), config.block, target.ends))


def test_every_index_stays_in_its_row_and_every_id_is_a_token() -> None:
    batch = ragged_batch(4)
    layout = LAYOUTS[2]
    blocks = blocks_of(batch, layout, anchors_of(batch, layout))
    for name in ("labels", "previous_ids", "input_ids"):
        assert (getattr(blocks, name) >= 0).all()
        assert (getattr(blocks, name) <= MASK).all()
    assert (blocks.label_index < batch.input_ids.shape[1]).all()


def test_the_first_label_of_every_drawn_block_counts() -> None:
    batch = ragged_batch(8)
    layout = LAYOUTS[1]
    blocks = blocks_of(batch, layout, anchors_of(batch, layout, 50))
    assert torch.equal(blocks.label_mask[..., 0], blocks.valid)


def test_another_token_changes_the_blocks_that_hold_it_and_no_others() -> None:
    batch = ragged_batch(4)
    layout = LAYOUTS[1]
    anchors = anchors_of(batch, layout)
    before = blocks_of(batch, layout, anchors)
    row, n = 1, 2
    index = int(anchors.index[row, n]) + 1
    batch.input_ids[row, index] += 1
    after = blocks_of(batch, layout, anchors)
    assert before.labels[row, n, 0] + 1 == after.labels[row, n, 0]
    untouched = [i for i in range(3) if i != row]
    for name, tensor in before.tensors().items():
        assert torch.equal(tensor[untouched], getattr(after, name)[untouched])


def test_to_moves_every_tensor() -> None:
    batch = ragged_batch()
    moved = blocks_of(batch, LAYOUTS[0], anchors_of(batch, LAYOUTS[0])).to("meta")
    assert len(moved.tensors()) == len(fields(moved)) - 1
    assert all(tensor.is_meta for tensor in moved.tensors().values())
    assert moved.max_labels > 0
