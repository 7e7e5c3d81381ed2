import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.blocks.masks import (
    TILE,
    AttentionBackend,
    dense_attention,
    flex_block_attention,
    flex_mask,
    training_attention,
)
from draftsmith.blocks.visibility import block_visibility
from draftsmith.drafts.attention import AttentionInputs, AttentionKind
from draftsmith.errors import DraftsmithError
from tests.blocks.packed import Batch, Document, anchors_of, blocks_of, owner, pack, ragged_batch, random_document

LAYOUT = BlockLayout(BlockKind.ANCHOR_KNOWN, 5)
KINDS = [AttentionKind(window, causal) for window in (None, 1, 3, 7) for causal in (False, True)]


def sees(batch: Batch, row: int, anchor: int, slot: int, key: int, block: int, kind: AttentionKind) -> bool:
    """The rule, spelt out for one query (slot of a block) and one key."""
    context = batch.input_ids.shape[1]
    if key < context:
        place, here = owner(batch, row, key), owner(batch, row, anchor)
        if place is None or here is None or place[0] is not here[0] or place[1] >= here[1]:
            return False
        return kind.window is None or place[1] >= here[1] + slot - (kind.window - 1)
    other_block, other_slot = divmod(key - context, LAYOUT.block_size)
    near = kind.window is None or abs(slot - other_slot) < kind.window
    return other_block == block and near and not (kind.causal and other_slot > slot)


@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_mask_is_as_defined(kind: AttentionKind) -> None:
    batch = ragged_batch(2)
    anchors = anchors_of(batch, LAYOUT)
    mask = dense_attention(blocks_of(batch, LAYOUT, anchors), batch.document, [kind]).masks[kind]
    queries = anchors.index.shape[1] * LAYOUT.block_size
    assert mask.shape == (3, 1, queries, 29 + queries)
    assert mask.dtype == torch.bool
    for row in range(3):
        for query in range(queries):
            block, slot = divmod(query, LAYOUT.block_size)
            anchor = int(anchors.index[row, block])
            wanted = [sees(batch, row, anchor, slot, key, block, kind) for key in range(29 + queries)]
            if not anchors.valid[row, block]:
                wanted[:29] = [False] * 29
            assert mask[row, 0, query].tolist() == wanted


def inputs(batch: Batch, num_blocks: int, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> list[Tensor]:
    rows, context = batch.input_ids.shape
    slots = num_blocks * LAYOUT.block_size
    shapes = [(heads, slots), (kv_heads, context), (kv_heads, context), (kv_heads, slots), (kv_heads, slots)]
    return [torch.randn(rows, h, n, dim) for h, n in shapes]


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 1.5, -2.0, 4.0])])
@pytest.mark.parametrize("kind", KINDS)
def test_flex_equals_dense(kind: AttentionKind, sinks: Tensor | None) -> None:
    batch = ragged_batch(3)
    blocks = blocks_of(batch, LAYOUT, anchors_of(batch, LAYOUT))
    tensors = inputs(batch, blocks.anchors.shape[1])
    kinds = [kind, AttentionKind(None, False)]
    flex = flex_block_attention(blocks, batch.document, kinds, compiled=False)
    dense = dense_attention(blocks, batch.document, kinds)
    found = flex(AttentionInputs(*tensors, kind=kind, scale=0.3, sinks=sinks))
    wanted = dense(AttentionInputs(*tensors, kind=kind, scale=0.3, sinks=sinks))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("kind", [*KINDS, AttentionKind(90, False)])
def test_the_tiles_are_those_that_the_mask_needs(kind: AttentionKind, block_size: int) -> None:
    generator = torch.Generator().manual_seed(block_size)
    rows = [[random_document(generator, f"{r}-{i}", n, 1.0) for i, n in enumerate((450, 70))] for r in range(2)]
    batch = pack(rows, 530)
    layout = BlockLayout(BlockKind.ANCHOR_KNOWN, block_size)
    blocks = blocks_of(batch, layout, anchors_of(batch, layout, 60))
    seen = block_visibility(blocks, batch.document, kind)
    found, dense = flex_mask(seen), seen.mask()
    queries, keys = dense.shape[2:]
    wanted = create_block_mask(
        lambda row, head, query, key: dense[row, 0, query, key], 2, None, queries, keys, device="cpu", BLOCK_SIZE=TILE
    )
    assert found.shape == wanted.shape
    assert torch.equal(found.to_dense(), wanted.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for kept, where in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        for at in getattr(wanted, kept).nonzero().tolist():
            count = getattr(wanted, kept)[*at]
            assert getattr(found, where)[*at][:count].tolist() == getattr(wanted, where)[*at][:count].tolist()
    if kind.window is None:
        assert found.full_kv_num_blocks.sum() > 0


@pytest.mark.parametrize("window", [None, 4])
def test_only_what_a_block_may_see_changes_it(window: int | None) -> None:
    documents = [Document(name, list(range(n)), [True] * n) for name, n in (("x", 9), ("y", 14))]
    batch = pack([documents], 25)
    anchors = anchors_of(batch, LAYOUT)
    blocks = blocks_of(batch, LAYOUT, anchors)
    kind = AttentionKind(window, False)
    attend = dense_attention(blocks, batch.document, [kind])
    tensors = inputs(batch, anchors.index.shape[1])
    before = attend(AttentionInputs(*tensors, kind=kind, scale=0.3, sinks=None))
    row = 0
    block, anchor = max(enumerate(anchors.index[row].tolist()), key=lambda item: item[1])
    place = owner(batch, row, anchor)
    assert place is not None
    assert place[0].id == "y"
    assert place[1] > 0
    own = slice(block * LAYOUT.block_size, (block + 1) * LAYOUT.block_size)

    for index, changes in ((anchor, False), (anchor + 1, False), (anchor - 1, True), (anchor - place[1] - 1, False)):
        context_v = tensors[2].clone()
        context_v[row, :, index] += 1.0
        after = attend(
            AttentionInputs(tensors[0], tensors[1], context_v, *tensors[3:], kind=kind, scale=0.3, sinks=None)
        )
        assert torch.equal(before[row, :, own], after[row, :, own]) != changes

    block_v = tensors[4].clone()
    block_v[row, :, : own.start] += 1.0
    block_v[row, :, own.stop :] += 1.0
    after = attend(AttentionInputs(*tensors[:4], block_v, kind=kind, scale=0.3, sinks=None))
    assert torch.equal(before[row, :, own], after[row, :, own])


def test_blocks_that_only_fill_the_shape_stay_finite() -> None:
    batch = ragged_batch(3)
    blocks = blocks_of(batch, LAYOUT, anchors_of(batch, LAYOUT))
    assert not blocks.valid.all()
    for kind in KINDS:
        attend = dense_attention(blocks, batch.document, [kind])
        assert (
            attend(AttentionInputs(*inputs(batch, blocks.anchors.shape[1]), kind=kind, scale=1.0, sinks=None))
            .isfinite()
            .all()
        )


def test_the_backend_is_chosen_and_never_guessed() -> None:
    batch = ragged_batch()
    blocks = blocks_of(batch, LAYOUT, anchors_of(batch, LAYOUT))
    kind = AttentionKind(None, False)
    with pytest.raises(DraftsmithError, match="'flex' trains on CUDA only"):
        training_attention(blocks, batch.document, [kind], AttentionBackend.FLEX)
    dense = training_attention(blocks, batch.document, [kind], AttentionBackend.DENSE)
    flex = flex_block_attention(blocks, batch.document, [kind], compiled=False)
    for attend in (dense, flex):
        with pytest.raises(DraftsmithError, match="no attention mask for layers of"):
            attend(
                AttentionInputs(
                    *inputs(batch, blocks.anchors.shape[1]), kind=AttentionKind(3, True), scale=1.0, sinks=None
                )
            )
