"""How the engine chooses: ties, and which random numbers a filler's draws take."""

import pytest
import torch

from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.rng import Stream, uniform_pair
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import SamplingOptions, distribution, draw_token
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_model
from tests.support.tiny_draft import tiny_draft

HALF = 41


@pytest.fixture(scope="module")
def twins() -> Target:
    """A target in whose logits every token from HALF on equals the one HALF before it, bit for bit."""
    model = tiny_model("qwen3", vocab_size=2 * HALF, seed=3)
    with torch.no_grad():
        model.lm_head.weight[HALF:] = model.lm_head.weight[:HALF]
    return Target.from_model(model)


@pytest.mark.parametrize("verify_width", [1, 4])
def test_the_targets_ties_go_to_the_lowest_id(twins: Target, verify_width: int) -> None:
    prompts = [[60, 3, 77], [1, 2, 50, 4, 5]]
    plain = generate(twins, None, prompts, max_new_tokens=12, options=EngineOptions(verify_width=verify_width))
    drafted = generate(twins, tiny_draft(twins), prompts, max_new_tokens=12)
    for row, other in zip(plain, drafted, strict=True):
        assert max(row.token_ids) < HALF
        assert row.token_ids == other.token_ids
    sampled = generate(twins, None, prompts, max_new_tokens=12, temperature=1.0, seed=1)
    assert max(token for row in sampled for token in row.token_ids) >= HALF


def test_a_greedy_sampler_takes_the_lowest_of_equals_and_says_no_distribution() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 0.0, 3.0]])
    sampler = RowSampler(SamplingOptions(), torch.tensor([1, 2]), torch.tensor([5, 6]))
    ids, q = sampler(logits, 0)
    assert ids.tolist() == [1, 0]
    assert q is None


def test_every_draw_of_a_block_takes_numbers_of_its_own() -> None:
    rows, options = 500, SamplingOptions(0.8, 0.95, 20)
    seeds, anchors = torch.arange(rows) * 7919 + 1, torch.arange(rows) % 11 + 3
    logits = torch.randn(rows, 60, generator=torch.Generator().manual_seed(4))
    sampler = RowSampler(options, seeds, anchors)
    drawn = []
    for draw in range(3):
        ids, q = sampler(logits, draw)
        assert q is not None
        assert torch.equal(q, distribution(logits, options))
        assert torch.equal(ids, draw_token(q, uniform_pair(seeds, anchors, Stream.PROPOSAL, draw)[0]))
        drawn.append(ids)
    # Numbers of the target's stream at the anchor or next to it would tie what is proposed to what verifies it.
    for offset in range(3):
        verifying = uniform_pair(seeds, anchors + offset, Stream.TOKEN)
        drawn += [draw_token(q, number) for number in verifying]
    for i, first in enumerate(drawn):
        for second in drawn[i + 1 :]:
            assert (first == second).float().mean() < 0.5
