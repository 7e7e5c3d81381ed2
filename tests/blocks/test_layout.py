import pytest
import torch

from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.errors import DraftsmithError


@pytest.mark.parametrize(("kind", "labels", "first"), [(BlockKind.ANCHOR_KNOWN, 6, 1), (BlockKind.ANCHOR_FIRST, 7, 0)])
def test_slots_and_labels_line_up(kind: BlockKind, labels: int, first: int) -> None:
    layout = BlockLayout(kind, 7)
    assert (layout.num_labels, layout.max_proposals, layout.verify_width(labels)) == (labels, labels, labels + 1)
    anchors = torch.tensor([[4, 11]])
    assert layout.label_positions(anchors).tolist() == [[[a + 1 + j for j in range(labels)] for a in (4, 11)]]
    slots = torch.arange(7).expand(2, 7)
    assert layout.predicting(slots, dim=1).tolist() == [list(range(first, 7))] * 2


def test_a_block_of_one_slot_is_refused() -> None:
    with pytest.raises(DraftsmithError, match="block_size is 1"):
        BlockLayout(BlockKind.ANCHOR_KNOWN, 1)
