"""DFlash 2 from capture to decoding: it learns the counting language, and its output is the target's own."""

from typing import Any

import pytest
import torch

from draftsmith.algorithms.drafter import Proposals
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads.dflash2 import DFlash2Head
from draftsmith.targets.target import Target
from tests.families.counting import PROMPTS, SYMBOLS, assert_commits_maximum, train_counting
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft
from tests.test_losslessness import SAMPLINGS, SMALL, decode_small, p_value, small_models

HEAD: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
WEIGHTINGS: list[dict[str, Any]] = [{"kind": "decay", "gamma": 4.0}, {"kind": "dpace"}]


def dflash2_draft(target: Target, head: dict[str, Any] = HEAD, **options: Any) -> Draft:
    return tiny_draft(target, **({"architecture": "dflash2", "head": head} | options))


# --- the counting language --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda weighting: weighting["kind"])
def test_the_counting_language_commits_the_maximum(weighting: dict[str, Any]) -> None:
    target, draft = train_counting({"algorithm": "dflash2", **HEAD, "objective": {"weighting": weighting}}, steps=110)
    assert draft.config.head.model_dump() == HEAD
    assert_commits_maximum(target, draft)  # B tokens every verify
    assert_commits_maximum(target, draft, num_proposals=2)
    # Mutated: a selector that has learnt the successors of other tokens leads the path astray.
    assert isinstance(draft.head, DFlash2Head)
    with torch.no_grad():
        codebook = draft.head.candidate_selector.successor_codebook
        codebook.copy_(40.0 * codebook.roll(1, 0))
    results = generate(target, draft, PROMPTS, max_new_tokens=16)
    counted = [[(prompt[-1] + 1 + i) % SYMBOLS for i in range(16)] for prompt in PROMPTS]
    assert [result.token_ids for result in results] == counted
    assert min(length for result in results for length in result.accept_lengths) < draft.config.block.size


# --- losslessness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("block_size", [2, 7])
def test_greedy_equals_plain_decoding(kind: str, block_size: int) -> None:
    target = tiny_target(kind)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(97, (n,), generator=generator).tolist() for n in (5, 1, 19, 8)]
    plain = generate(target, None, prompts, max_new_tokens=17)
    scale = 2.0 if kind == "gemma3" else 1.0
    draft = dflash2_draft(target, block_size=block_size, input_embedding_scale=scale, final_logit_softcapping=9.0)
    for num_proposals in (None, 1):
        options = EngineOptions(num_proposals=num_proposals)
        drafted = generate(target, draft, prompts, max_new_tokens=17, options=options)
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert generate(target, draft, prompts[2:3], max_new_tokens=17, options=options) == drafted[2:3]


def test_greedy_equals_plain_decoding_when_the_draft_is_often_right() -> None:
    """Three tokens of vocabulary: a random draft is right every third time."""
    target = tiny_target("qwen3", vocab_size=3, seed=5)
    prompts = [[0, 2, 1], [1], [2, 2, 0, 1, 1, 0]]
    plain = generate(target, None, prompts, max_new_tokens=50)
    lengths: set[int] = set()
    for seed in range(4):
        draft = dflash2_draft(target, head={**HEAD, "selector_top_k": 2}, seed=seed)
        drafted = generate(target, draft, prompts, max_new_tokens=50)
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
        lengths.update(length for result in drafted for length in result.accept_lengths)
    assert {1, 2, 3} <= lengths


def sampled(sampling: SamplingOptions, top_k: int, *, wrong_q: bool = False) -> list[Generation]:
    target, _ = small_models()
    head = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": top_k}
    draft = dflash2_draft(target, head, num_layers=1, block_size=4, head_dim=4, intermediate_size=16, seed=17)
    engine = Engine(target, draft)
    if wrong_q:
        engine.drafter.filler = Forgetful(engine.drafter.filler)
    return decode_small(engine, sampling, new=4)


class Forgetful:
    """Mutated: claims that its tokens were drawn from a uniform distribution."""

    def __init__(self, filler: Any) -> None:
        self.filler, self.num_proposals = filler, filler.num_proposals

    def fill(self, *arguments: Any) -> Proposals:
        proposals = self.filler.fill(*arguments)
        return Proposals(proposals.token_ids, torch.full_like(proposals.q, 1 / SMALL))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=1", "T=0.7, top-k, top-p"])
@pytest.mark.parametrize("top_k", [3, SMALL])
def test_sampled_output_has_the_targets_distribution(top_k: int, sampling: SamplingOptions) -> None:
    results = sampled(sampling, top_k)
    assert p_value(results, sampling) > 1e-3
    assert {length for result in results for length in result.accept_lengths} == {1, 2, 3}


def test_a_q_that_is_not_the_selector_s_is_caught() -> None:
    assert p_value(sampled(SAMPLINGS[0], 3, wrong_q=True), SAMPLINGS[0]) < 1e-6
