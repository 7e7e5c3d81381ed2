import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from draftsmith.algorithms.dta import DTASection
from draftsmith.algorithms.registry import algorithm
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.errors import DraftsmithError
from tests.blocks.packed import MASK, anchors_of, blocks_of, ragged_batch
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft


@pytest.mark.parametrize(("base", "block_size"), [(0.9, 16), (0.5, 5), (1e9, 40), (1.0, 3)])
def test_prefix_lengths_have_the_stated_distribution(base: float, block_size: int) -> None:
    draw = algorithm("dta").visible_slots(DTASection(visible_base=base), block_size)
    assert draw is not None
    lengths = draw(np.random.default_rng(0), 20_000)
    assert lengths.min() >= 2
    assert lengths.max() <= block_size - 1
    if base < 2.0:
        chances = np.array([base**v for v in range(2, block_size)])
        counts = np.bincount(lengths, minlength=block_size)[2:]
        assert len(chances) == 1 or chisquare(counts, 20_000 * chances / chances.sum()).pvalue > 1e-3
    else:
        assert (lengths == block_size - 1).all()


def test_only_slots_after_the_prefix_are_masked_and_supervised() -> None:
    batch, layout = ragged_batch(6), BlockLayout(BlockKind.ANCHOR_KNOWN, 7)
    anchors = anchors_of(batch, layout, 30, visible_slots=algorithm("dta").visible_slots(DTASection(), 7))
    blocks = blocks_of(batch, layout, anchors)
    assert anchors.visible[anchors.valid].unique().tolist() == [2, 3, 4, 5, 6]
    slots = torch.arange(7)
    hidden = slots >= anchors.visible.unsqueeze(-1)
    assert (blocks.input_ids[hidden] == MASK).all()
    assert not blocks.label_mask[~hidden[..., 1:]].any()
    assert torch.equal(blocks.first_label, anchors.visible - 1)


def test_a_block_without_room_for_a_prefix_is_refused() -> None:
    with pytest.raises(DraftsmithError, match="block_size is 2; dta shows"):
        algorithm("dta").visible_slots(DTASection(), 2)
    draft = tiny_draft(tiny_target(), block_size=2)
    with pytest.raises(DraftsmithError, match="block_size is 2; dta shows"):
        algorithm("dta").capture(draft.config)


def test_dflash_shows_the_anchor_alone() -> None:
    assert algorithm("dflash").visible_slots(algorithm("dflash").section(algorithm="dflash"), 5) is None
