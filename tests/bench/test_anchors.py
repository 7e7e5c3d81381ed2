"""The chances of the report are those by which the draft chose, whatever proposes on the device at hand."""

import pytest
import torch

from draftsmith.algorithms.dflash2 import DFlash2
from draftsmith.algorithms.options import DecodingOptions
from draftsmith.algorithms.registry import algorithm_for
from draftsmith.bench.anchors import proposals_at
from draftsmith.drafts.draft import Draft
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.target import Target
from tests.algorithms.reference import block_hidden
from tests.blocks.packed import Document
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 7}
ANCHORS = [5, 9, 17]


def states(target: Target, draft: Draft, text: list[int], anchor: int) -> torch.Tensor:
    """The predicting slots' states [P, H] of the block at `anchor`, which alone is computed."""
    ids = torch.tensor([text])
    read = target.forward(ids, torch.arange(len(text))[None], tap_ids=draft.config.target_layer_ids, final_state=False)
    assert read.taps is not None
    hidden = block_hidden(draft, target.ends, Document("text", text, []), read.taps[0], anchor, 1)
    return algorithm_for(draft.config).block_layout(draft.config).predicting(hidden, dim=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_chances_of_independent_slots(kind: str) -> None:
    target = tiny_target(kind, num_layers=2)
    draft = tiny_draft(target, block_size=5, input_embedding_scale=target.info.embedding_scale or 1.0)
    text = torch.randint(97, (18,)).tolist()
    found = proposals_at(target, draft, text, ANCHORS)
    for row, anchor in enumerate(ANCHORS):
        wanted = draft.logits(states(target, draft, text, anchor), target.ends).softmax(-1).max(-1)
        assert torch.equal(found.token_ids[row], wanted.indices)
        torch.testing.assert_close(found.chances[row], wanted.values)
    text[2] = (text[2] + 1) % 97
    assert not torch.allclose(proposals_at(target, draft, text, ANCHORS).chances, found.chances)


@torch.no_grad()
def test_chances_of_a_selector_are_among_its_candidates_also_where_kernels_propose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from draftsmith.algorithms.dflash2_rollout import KernelDFlash2Filler

    target = tiny_target("llama", num_layers=2, vocab_size=300)
    draft = tiny_draft(target, architecture="dflash2", block_size=5, head=SELECTOR)
    selector = draft.head.candidate_selector
    selector.successor_codebook.mul_(4.0)
    text = torch.randint(300, (18,)).tolist()

    def by_kernels(
        self: DFlash2, draft: Draft, ends: TargetEnds, options: DecodingOptions
    ) -> KernelDFlash2Filler:  # what a CUDA device has
        return KernelDFlash2Filler(draft, ends, self.block_layout(draft.config), options.num_proposals or 4)

    monkeypatch.setattr(DFlash2, "filler", by_kernels)
    found = proposals_at(target, draft, text, ANCHORS)
    differs = 0
    for row, anchor in enumerate(ANCHORS):
        previous = torch.tensor(text[anchor])
        for slot, state in enumerate(states(target, draft, text, anchor)):
            unary = draft.logits(state, target.ends)
            offered = unary.topk(7).indices
            wanted = selector.scores(unary, selector.latent(state, previous), offered).softmax(-1).max(-1)
            previous = offered[wanted.indices]
            assert found.token_ids[row, slot] == previous
            torch.testing.assert_close(found.chances[row, slot], wanted.values)
            differs += not torch.isclose(wanted.values, unary.softmax(-1)[previous], rtol=0.1)
    assert differs > 6, "the selector matters"
