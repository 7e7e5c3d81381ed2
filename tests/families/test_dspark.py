"""DSpark with every head: it learns the counting language, and its output is the target's own."""

from functools import cache
from typing import Any

import pytest
from torch import Tensor

from draftsmith.decoding import step as step_module
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.target import Target
from tests.families.counting import assert_commits_maximum, train_counting
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import dspark_head, tiny_draft
from tests.test_losslessness import SAMPLINGS, decode_small, p_value, plain_answers, prompts, small_models, target_of

KINDS = ("vanilla", "gated", "rnn")


def head(kind: str, rank: int = 4) -> dict[str, Any]:
    return dspark_head(kind, with_markov=kind != "gated", rank=rank)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_counting_language_commits_the_maximum(kind: str) -> None:
    # L1 has hardly any gradient where the draft is sure and wrong: the published weights take long for the last label.
    section = {"algorithm": "dspark", **head(kind, rank=6), "objective": {"cross_entropy_weight": 1.0}}
    target, draft = train_counting(section, steps=160)
    assert_commits_maximum(target, draft)  # B + 1 tokens every verify
    assert_commits_maximum(target, draft, num_proposals=2)
    # The confidence head has learnt that nothing is rejected: a low bar holds no proposal back.
    assert_commits_maximum(target, draft, proposer={"min_survival": 0.2})


# --- losslessness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_survival", [None, 0.3])
@pytest.mark.parametrize("block_size", [2, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain_decoding(kind: str, block_size: int, min_survival: float | None) -> None:
    target = target_of("qwen3")
    draft = tiny_draft(target, architecture="dspark", head=head(kind), block_size=block_size, seed=1)
    options = EngineOptions(proposer={} if min_survival is None else {"min_survival": min_survival})
    results = generate(target, draft, prompts(), max_new_tokens=20, options=options)
    assert [result.token_ids for result in results] == plain_answers("qwen3")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain_decoding_when_the_draft_is_often_right(kind: str) -> None:
    """A vocabulary of three: a random draft is right every third time. A bar on the survival only shortens blocks."""
    target = tiny_target("qwen3", vocab_size=3, seed=5)
    short = [[token % 3 for token in prompt] for prompt in prompts()]
    plain = [result.token_ids for result in generate(target, None, short, max_new_tokens=36)]
    draft = tiny_draft(target, architecture="dspark", head=head(kind, rank=2), block_size=7)
    lengths: dict[float | None, list[int]] = {}
    for bar in (None, 0.4, 1.0):
        options = EngineOptions(proposer={} if bar is None else {"min_survival": bar})
        results = generate(target, draft, short, max_new_tokens=36, options=options)
        assert [result.token_ids for result in results] == plain
        lengths[bar] = [length for result in results for length in result.accept_lengths]
    assert {1, 2} < set(lengths[None])
    assert sum(lengths[None]) / len(lengths[None]) > sum(lengths[0.4]) / len(lengths[0.4]) > 1.0
    assert set(lengths[1.0]) == {1}  # no sigmoid reaches it: nothing is proposed


@cache
def small_draft(kind: str) -> tuple[Target, Draft]:
    """For the target of the exact enumeration: three proposals a block, a head that matters."""
    target, _ = small_models()
    sizes: dict[str, Any] = {"num_layers": 1, "block_size": 3, "head_dim": 4, "intermediate_size": 16}
    return target, tiny_draft(target, architecture="dspark", head=head(kind, rank=3), seed=17, **sizes)


SAMPLED = [(kind, bar, SAMPLINGS[0]) for kind in KINDS for bar in (None, 0.3)] + [("rnn", 0.1, SAMPLINGS[1])]


@pytest.mark.parametrize(("kind", "bar", "sampling"), SAMPLED)
def test_sampled_output_has_the_targets_distribution(kind: str, bar: float | None, sampling: SamplingOptions) -> None:
    options = EngineOptions(proposer={} if bar is None else {"min_survival": bar})
    results = decode_small(Engine(*small_draft(kind), options), sampling, new=4)
    assert p_value(results, sampling) > 1e-3
    assert {length for result in results for length in result.accept_lengths} >= {1, 2}


class MisreportingSampler(RowSampler):
    """Mutated: it draws from the right logits, and reports a q of other ones."""

    def __call__(self, logits: Tensor, draw: int) -> tuple[Tensor, Tensor | None]:
        ids, q = super().__call__(logits, draw)
        assert q is not None
        return ids, q.roll(1, dims=-1)


def test_a_wrong_q_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "RowSampler", MisreportingSampler)
    results = decode_small(Engine(*small_draft("vanilla")), SAMPLINGS[0], new=4, rows=4_000)
    assert p_value(results, SAMPLINGS[0]) < 1e-6


def test_options_of_other_methods_are_refused() -> None:
    target, draft = small_models()
    with pytest.raises(DraftsmithError, match=r"dflash has no decoding options .*remove min_survival=0\.5"):
        Engine(target, draft, EngineOptions(proposer={"min_survival": 0.5}))
