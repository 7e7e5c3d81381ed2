"""The anchored attention kernels equal dense attention; where they cannot be used, they say so."""

import os
import subprocess
import sys

import pytest
import torch

from draftsmith.blocks.anchored import AnchoredBlockAttention, anchored_attention, takes
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.blocks.masks import dense_mask
from draftsmith.blocks.sight import sight
from draftsmith.drafts.attention import AttentionKind
from draftsmith.errors import DraftsmithError
from tests.blocks.packed import anchors_of, blocks_of, pack, random_document

pytest.importorskip("triton")


@pytest.mark.slow
def test_the_kernels_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.blocks.anchored_in_interpreter"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", [AttentionKind(None, False), AttentionKind(9, True), AttentionKind(3, False)])
def test_the_slots_of_a_tile_of_keys_are_those_of_the_mask(kind):
    generator = torch.Generator().manual_seed(1)
    layout = BlockLayout(BlockKind.ANCHOR_KNOWN, 5)
    documents = [[random_document(generator, f"{r}-{i}", n) for i, n in enumerate((60, 9, 31))] for r in range(2)]
    batch = pack(documents, 110)
    blocks = blocks_of(batch, layout, anchors_of(batch, layout, 12))
    seen = sight(blocks, batch.document, kind)
    mask = dense_mask(seen)[:, 0, :, :110]  # [R, Q, S]
    by_key = anchored_attention(blocks, batch.document, [kind], keys=16).runs[kind].by_key
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
    assert takes(128, torch.bfloat16)
    assert takes(64, torch.float16)
    assert not takes(96, torch.bfloat16)
    assert not takes(128, torch.float32)
    attend = AnchoredBlockAttention({})
    q = torch.zeros(1, 1, 4, 24)
    with pytest.raises(DraftsmithError, match="and these have 24; use 'flex'"):
        attend(q, q, q, q, q, kind=AttentionKind(None, False), scale=1.0, sinks=None)
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(DraftsmithError, match="no attention runs for layers of"):
        attend(q, q, q, q, q, kind=AttentionKind(None, False), scale=1.0, sinks=None)
