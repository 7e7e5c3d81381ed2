"""The anchored attention kernels equal dense attention; where they cannot be used, they say so."""

from functools import partial

import pytest
import torch

from draftsmith.blocks.anchored import anchored_block_attention
from draftsmith.blocks.anchored import takes as takes_on
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.blocks.masks import dense_attention
from draftsmith.blocks.visibility import block_visibility
from draftsmith.drafts.attention import AttentionInputs, AttentionKind
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.attention.anchored_attention import AnchoredTiling
from draftsmith.kernels.tiling import Tiling
from tests.blocks.packed import anchors_of, blocks_of, pack, random_document

pytest.importorskip("triton")


# Several tiles at sizes that the interpreter gets through.
SMALL = AnchoredTiling(
    forward=Tiling(rows=32, columns=16), queries=Tiling(rows=16, columns=16), keys=Tiling(rows=16, columns=16)
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter; tests/gpu has the compiled kernels")
def test_the_kernels_equal_dense_attention():
    generator = torch.Generator().manual_seed(3)
    plain, sunk = (AttentionKind(None, False), None), (AttentionKind(7, True), torch.linspace(-1, 2, 3))
    for block_size, heads, kv_heads, (kind, sinks) in ((5, 4, 2, plain), (4, 3, 1, sunk)):
        layout = BlockLayout(BlockKind.ANCHOR_KNOWN, block_size)
        documents = [[random_document(generator, f"{r}-{i}", n) for i, n in enumerate((23, 9))] for r in range(2)]
        batch = pack(documents, 37)
        blocks = blocks_of(batch, layout, anchors_of(batch, layout, 5))
        assert not blocks.valid.all()
        slots = blocks.anchors.shape[1] * block_size
        shapes = ((heads, slots), (kv_heads, 37), (kv_heads, 37), (kv_heads, slots), (kv_heads, slots))
        tensors = [torch.randn(2, n, h, 16, generator=generator).transpose(1, 2) for h, n in shapes]
        grad = torch.randn(2, heads, slots, 17, generator=generator)[..., 1:]  # what a descriptor cannot describe
        results = []
        for attend in (
            dense_attention(blocks, batch.document, [kind]),
            anchored_block_attention(blocks, batch.document, [kind], SMALL),
        ):
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            sink = None if sinks is None else sinks.clone().requires_grad_()
            out = attend(AttentionInputs(*leaves, kind=kind, scale=0.3, sinks=sink))
            out.backward(grad)
            results.append([out, *(leaf.grad for leaf in leaves), *([] if sink is None else [sink.grad])])
        for wanted, found in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    # What no slot may see changes nothing, what one sees does.
    attend = anchored_block_attention(blocks, batch.document, [kind], SMALL)
    before = attend(AttentionInputs(*tensors, kind=kind, scale=0.3, sinks=None))
    anchor = int(blocks.anchors[0].max())
    for index, changes in ((anchor, False), (anchor - 1, True)):
        values = tensors[2].clone()
        values[0, :, index] += 1.0
        after = attend(AttentionInputs(*tensors[:2], values, *tensors[3:], kind=kind, scale=0.3, sinks=None))
        assert torch.equal(before, after) != changes, index


@pytest.mark.parametrize("kind", [AttentionKind(None, False), AttentionKind(9, True), AttentionKind(3, False)])
def test_the_slots_of_a_tile_of_keys_are_those_of_the_mask(kind):
    generator = torch.Generator().manual_seed(1)
    layout = BlockLayout(BlockKind.ANCHOR_KNOWN, 5)
    documents = [[random_document(generator, f"{r}-{i}", n) for i, n in enumerate((60, 9, 31))] for r in range(2)]
    batch = pack(documents, 110)
    blocks = blocks_of(batch, layout, anchors_of(batch, layout, 12))
    seen = block_visibility(blocks, batch.document, kind)
    mask = seen.mask()[:, 0, :, :110]  # [R, Q, S]
    by_key = anchored_block_attention(blocks, batch.document, [kind]).runs(kind, 16).by_key
    some = 0
    for row in range(2):
        for tile in range(7):
            part = mask[row, :, 16 * tile : 16 * (tile + 1)]
            first, end, whole_first, whole_end = by_key[row, tile].tolist()
            sees = part.any(-1).nonzero().flatten().tolist()
            # Whole blocks: every slot that sees any key is inside, and every slot of the inner run sees all.
            assert all(first <= slot < end for slot in sees)
            assert part[max(whole_first, first) : max(whole_end, 0)].all()
            some += max(0, whole_end - max(whole_first, first))
    assert some > 0 or kind.window is not None


def test_what_the_kernels_take():
    takes = partial(takes_on, shared_memory=227 * 1024)
    assert takes(128, torch.bfloat16, group=4, block_size=16)
    assert takes(64, torch.float16, group=3, block_size=32)
    assert takes(16, torch.bfloat16, group=8, block_size=9)
    assert not takes(96, torch.bfloat16, group=1, block_size=8)
    assert not takes(256, torch.bfloat16, group=1, block_size=8)
    assert not takes(128, torch.float32, group=4, block_size=16)
    assert not takes(128, torch.bfloat16, group=8, block_size=17)
    assert not takes(128, torch.bfloat16, group=9, block_size=16)
    assert not takes_on(128, torch.bfloat16, group=4, block_size=16, shared_memory=99 * 1024)


def test_what_they_do_not_take_is_refused():
    generator = torch.Generator().manual_seed(2)
    layout = BlockLayout(BlockKind.ANCHOR_KNOWN, 5)
    batch = pack([[random_document(generator, "0", 20)]], 20)
    blocks = blocks_of(batch, layout, anchors_of(batch, layout, 3))
    kind = AttentionKind(None, False)
    attend = anchored_block_attention(blocks, batch.document, [kind])
    q = torch.zeros(1, 1, 15, 24)
    with pytest.raises(DraftsmithError, match=r"these have 24; use 'flex' \(train.attention=flex\)"):
        attend(AttentionInputs(q, q, q, q, q, kind=kind, scale=1.0, sinks=None))
    q = torch.zeros(1, 17, 15, 16)
    with pytest.raises(DraftsmithError, match="5 slots x 17 heads, each rounded up to a power of two, make 256"):
        attend(AttentionInputs(q, q[:, :1], q[:, :1], q[:, :1], q[:, :1], kind=kind, scale=1.0, sinks=None))
    q = torch.zeros(1, 1, 15, 16)
    with pytest.raises(DraftsmithError, match="no attention runs for layers of"):
        attend(AttentionInputs(q, q, q, q, q, kind=AttentionKind(3, False), scale=1.0, sinks=None))
