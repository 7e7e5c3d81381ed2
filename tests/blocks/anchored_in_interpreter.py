"""Compares the anchored attention kernels with dense attention; for a process with TRITON_INTERPRET=1."""

import torch

from draftsmith.blocks.anchored import anchored_attention
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.blocks.masks import dense_attention
from draftsmith.drafts.attention import AttentionKind
from draftsmith.kernels.anchored_attention import Tiling
from tests.blocks.packed import anchors_of, blocks_of, pack, random_document

# Several tiles at sizes that the interpreter gets through.
SMALL = Tiling(rows=32, keys=16, dq_rows=16, dq_keys=16, dkv_rows=16, dkv_keys=16)


def main() -> None:
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
            anchored_attention(blocks, batch.document, [kind], SMALL),
        ):
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            sink = None if sinks is None else sinks.clone().requires_grad_()
            out = attend(*leaves, kind=kind, scale=0.3, sinks=sink)
            out.backward(grad)
            results.append([out, *(leaf.grad for leaf in leaves), *([] if sink is None else [sink.grad])])
        for wanted, found in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    # What no slot may see changes nothing, what one sees does.
    attend = anchored_attention(blocks, batch.document, [kind], SMALL)
    before = attend(*tensors, kind=kind, scale=0.3, sinks=None)
    anchor = int(blocks.anchors[0].max())
    for index, changes in ((anchor, False), (anchor - 1, True)):
        values = tensors[2].clone()
        values[0, :, index] += 1.0
        after = attend(*tensors[:2], values, *tensors[3:], kind=kind, scale=0.3, sinks=None)
        assert torch.equal(before, after) != changes, index


if __name__ == "__main__":
    main()
