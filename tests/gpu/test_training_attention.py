"""Training attention on the device, by flex_attention and by kernels of its own, equals the dense one, forward and
backward."""

import pytest
import torch

from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.blocks.masks import AttentionBackend, training_attention
from draftsmith.drafts.attention import AttentionInputs, AttentionKind
from tests.blocks.packed import anchors_of, blocks_of, pack, random_document

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KINDS = [AttentionKind(window, causal) for window in (None, 40) for causal in (False, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("block_size", "dim"), [(16, 128), (7, 64)])
def test_every_way_equals_dense(dtype: torch.dtype, with_sinks: bool, block_size: int, dim: int) -> None:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(block_size)
    layout = BlockLayout(BlockKind.ANCHOR_KNOWN, block_size)
    for length, budget in ((301, 9), (640, 30), (1024, 17)):  # shapes change between batches
        lengths = [length // 2 + 3, length // 4, length // 5]
        rows = [[random_document(generator, f"{r}-{i}", n) for i, n in enumerate(lengths)] for r in range(3)]
        batch = pack(rows, length)
        blocks = blocks_of(batch, layout, anchors_of(batch, layout, budget)).to("cuda")
        document = batch.document.cuda()
        slots = blocks.anchors.shape[1] * block_size
        shapes = [(8, slots), (2, length), (2, length), (2, slots), (2, slots)]
        tensors = [torch.randn(3, h, n, dim, device="cuda", dtype=dtype) for h, n in shapes]
        grad = torch.randn_like(tensors[0])
        results = []
        for backend in AttentionBackend:
            attend = training_attention(blocks, document, KINDS, backend)
            of_kind = []
            for kind in KINDS:
                leaves = [t.clone().requires_grad_() for t in tensors]
                sinks = torch.linspace(-2, 3, 8, device="cuda").requires_grad_() if with_sinks else None
                out = attend(AttentionInputs(*leaves, kind=kind, scale=dim**-0.5, sinks=sinks))
                assert out.dtype == dtype
                out.backward(grad)
                of_kind.append([out, *(leaf.grad for leaf in leaves), *([sinks.grad] if sinks is not None else [])])
            results.append(of_kind)
        tolerance = {torch.float32: 2e-2, torch.bfloat16: 5e-2}[dtype]
        dense, *others = results
        for backend, other in zip(list(AttentionBackend)[1:], others, strict=True):
            for kind, wanted_of, found_of in zip(KINDS, dense, other, strict=True):
                for number, (wanted, found) in enumerate(zip(wanted_of, found_of, strict=True)):
                    error = (wanted.float() - found.float()).norm() / wanted.float().norm()
                    assert error < tolerance / 2, (backend, kind, number, error.item())
