import pytest
import torch

from draftsmith.blocks.anchors import Anchors
from draftsmith.blocks.build import build_blocks
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.blocks.masks import dense_attention
from draftsmith.drafts.attention import AttentionKind
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.runner import DenseBlocks, FusedBlocks, block_masks, block_runner
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

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
    assert (cache.joint[..., 20:, :] == 0).all()


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
        torch.testing.assert_close(cache.joint[0, 0, row][:, positions[row]], keys[row])
        torch.testing.assert_close(cache.joint[0, 1, row][:, positions[row]], values[row])


class OnCuda(Draft):
    """A draft that says it is on a GPU; nothing is launched on it here."""

    device = property(lambda self: torch.device("cuda"))


@pytest.mark.parametrize(("block_size", "fused"), [(32, True), (33, False)])
def test_a_slower_way_to_run_blocks_is_said(
    target: Target, caplog: pytest.LogCaptureFixture, block_size: int, fused: bool
) -> None:
    pytest.importorskip("triton")
    draft = tiny_draft(target, block_size=block_size)
    assert isinstance(block_runner(draft), DenseBlocks)  # on a CPU, where there is no other way
    assert not caplog.records
    draft.__class__ = OnCuda
    assert type(block_runner(draft)) is (FusedBlocks if fused else DenseBlocks)
    said = [] if fused else ["the draft's blocks have 33 slots and the fused pass takes up to 32: the draft's own"]
    assert [record.getMessage()[: len(said[0])] for record in caplog.records] == said
