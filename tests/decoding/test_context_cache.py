import pytest
import torch

from draftsmith.blocks.anchors import Anchors
from draftsmith.blocks.build import build_blocks
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.blocks.masks import dense_attention
from draftsmith.decoding.cache import DenseBlocks, block_masks
from draftsmith.drafts.attention import AttentionKind
from tests.tiny import tiny_target
from tests.tiny_draft import tiny_draft

KINDS = [AttentionKind(window, causal) for window in (None, 1, 3, 9) for causal in (False, True)]


def test_a_block_sees_in_decoding_what_it_sees_in_training() -> None:
    """One row a block: the training masks of the same anchors, in rows of one document each."""
    length, block_size = 23, 7
    anchors = torch.tensor([1, 2, 6, 11, 16, 22])
    rows = len(anchors)
    position = torch.arange(length).expand(rows, -1)
    chosen = Anchors(anchors[:, None], torch.ones(rows, 1, dtype=torch.bool), torch.ones(rows, 1, dtype=torch.int64))
    layout = BlockLayout(BlockKind.ANCHOR_KNOWN, block_size)
    document = torch.zeros(rows, length, dtype=torch.int64)
    blocks = build_blocks(position, position >= 0, position, document, chosen, layout, 0)
    trained = dense_attention(blocks, document, KINDS).masks
    decoded = block_masks(anchors, length, block_size, KINDS).masks
    assert decoded.keys() == trained.keys()
    for kind in KINDS:
        assert torch.equal(decoded[kind], trained[kind]), kind
    assert not torch.equal(decoded[KINDS[0]], decoded[KINDS[4]])


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_any_chunking_gives_the_same_context(chunk: int) -> None:
    target = tiny_target()
    draft = tiny_draft(target, num_layers=3)
    taps = torch.randn(2, 20, 2 * target.hidden_size)
    positions = torch.arange(20).expand(2, -1)
    blocks = DenseBlocks(draft)
    cache = blocks.new_cache(2, 32)
    with torch.no_grad():
        expected = draft.context_keys_values(taps, positions)
        for begin in range(0, 20, chunk):
            blocks.append(taps[:, begin : begin + chunk], torch.full((2,), begin), cache)
    for cached, made in zip(cache.view(20), expected, strict=True):
        torch.testing.assert_close(cached, made)
    assert (cache.storage[..., 20:, :] == 0).all()


def test_rows_write_at_their_own_positions_and_overwrite() -> None:
    target = tiny_target()
    draft = tiny_draft(target, num_layers=1)
    blocks = DenseBlocks(draft)
    cache = blocks.new_cache(2, 12)
    taps, start = torch.randn(2, 4, 2 * target.hidden_size), torch.tensor([2, 7])
    positions = start[:, None] + torch.arange(4)
    with torch.no_grad():
        blocks.append(torch.randn_like(taps), start, cache)
        blocks.append(taps, start, cache)
        ((keys, values),) = draft.context_keys_values(taps, positions)
    for row in range(2):
        torch.testing.assert_close(cache.storage[0, 0, row][:, positions[row]], keys[row])
        torch.testing.assert_close(cache.storage[0, 1, row][:, positions[row]], values[row])
