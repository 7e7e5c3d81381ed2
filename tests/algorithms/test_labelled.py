"""The labels that count, taken out and put back."""

import pytest
import torch
from pydantic import ValidationError

from draftsmith.algorithms.labelled import Chosen, HeadOptions
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.targets.ends import TargetEnds
from tests.blocks.packed import anchors_of, blocks_of, pack, random_document


@pytest.fixture
def blocks():
    generator = torch.Generator().manual_seed(5)
    layout = BlockLayout(BlockKind.ANCHOR_KNOWN, 5)
    documents = [[random_document(generator, f"{r}-{i}", n) for i, n in enumerate((19, 8))] for r in range(2)]
    batch = pack(documents, 29)
    found = blocks_of(batch, layout, anchors_of(batch, layout, 6))
    assert found.label_mask.any()
    assert not found.label_mask.all()
    return found


def test_labels_that_count_come_first_and_go_back_to_their_places(blocks):
    values = torch.randn(*blocks.label_mask.shape, 3, generator=torch.Generator().manual_seed(6))
    chosen = Chosen.labels(blocks)
    count = int(blocks.label_mask.sum())
    torch.testing.assert_close(chosen.take(values)[:count], values[blocks.label_mask], rtol=0, atol=0)
    spread = chosen.spread(chosen.take(values[..., 0]))
    torch.testing.assert_close(spread, values[..., 0] * blocks.label_mask, rtol=0, atol=0)


def test_blocks_with_labels_come_first_and_go_back_to_their_places(blocks):
    values = torch.randint(1, 99, blocks.label_mask.shape, generator=torch.Generator().manual_seed(7))
    chosen = Chosen.blocks(blocks)
    some = blocks.label_mask.any(-1)
    assert torch.equal(chosen.take(values)[: int(some.sum())], values[some])
    assert torch.equal(chosen.spread(chosen.take(values)), values * blocks.label_mask)
    assert chosen.spread(chosen.take(values)).dtype == torch.int64


def test_how_many_pass_the_head():
    ends = TargetEnds(torch.zeros(50_000, 2).bfloat16(), torch.zeros(50_000, 2).bfloat16())
    assert HeadOptions(head_chunk=7).rows_at_a_time(ends) == 7
    assert HeadOptions().rows_at_a_time(ends) == 4096
    with pytest.raises(ValidationError, match="head_chunk"):
        HeadOptions(head_chunk=0)
