"""Every method's filler that shows what each token was chosen from."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.algorithms.registry import algorithm, all_algorithms
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.target import Target
from tests.support.fillers import filler_of, stepwise_filler_of
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import dspark_head, tiny_draft

METHODS = [method.name for method in all_algorithms()]
HEADS: dict[str, dict[str, Any]] = {
    "dspark": dspark_head("rnn"),
    "domino": {"emb_dim": 8, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1, "shift_label": True},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("gemma3", num_layers=2, vocab_size=71)


def draft_of(target: Target, method: str) -> Draft:
    architecture = algorithm(method).architecture
    return tiny_draft(
        target, architecture=architecture, block_size=5, head=HEADS.get(architecture, {}), input_embedding_scale=2.5
    )


class Recorder:
    """A sampler that keeps what it is given, and chooses the token of some place in the order of likelihood."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.draws: list[int] = []
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor, draw: int) -> tuple[Tensor, None]:
        self.draws.append(draw)
        self.logits.append(logits)
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, self.place], None


@torch.no_grad()
@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("method", METHODS)
def test_the_sampler_is_asked_for_every_token_in_order(target: Target, method: str, count: int | None) -> None:
    draft = draft_of(target, method)
    hidden, anchors = torch.randn(4, 5, target.hidden_size), torch.randint(71, (4,))
    stepwise = stepwise_filler_of(method, draft, target.ends, count)
    filler = filler_of(method, draft, target.ends, count)
    greedy, second = Recorder(0), Recorder(1)
    found = stepwise.fill(hidden, anchors, greedy).token_ids
    sampler = RowSampler(SamplingOptions(), torch.arange(4), torch.arange(4))
    assert torch.equal(found, filler.fill(hidden, anchors, sampler).token_ids)
    assert greedy.draws == list(range(filler.num_proposals)) == list(range(stepwise.num_proposals))
    other = stepwise.fill(hidden, anchors, second).token_ids
    assert (other[:, 0] != found[:, 0]).all()
    # Slots that know nothing of each other have the same logits after another token; all others do not.
    same = all(torch.equal(a, b) for a, b in zip(greedy.logits, second.logits, strict=True))
    assert same == (algorithm(method).architecture == "dflash")


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_drawn_tokens_come_with_their_distribution(target: Target, method: str) -> None:
    draft = draft_of(target, method)
    hidden, anchors = torch.randn(4, 5, target.hidden_size), torch.randint(71, (4,))
    stepwise = stepwise_filler_of(method, draft, target.ends)
    found = stepwise.fill(hidden, anchors, RowSampler(SamplingOptions(0.9), torch.arange(4), torch.arange(4)))
    assert found.q is not None
    torch.testing.assert_close(found.q.sum(-1), torch.ones(4, stepwise.num_proposals))
    assert (found.q.gather(-1, found.token_ids[..., None]) > 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_more_proposals_than_a_block_has_are_refused(target: Target, method: str) -> None:
    with pytest.raises(DraftsmithError, match="num_proposals is 6"):
        stepwise_filler_of(method, draft_of(target, method), target.ends, 6)
