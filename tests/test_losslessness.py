"""The package's promise: speculative output is the target's own, greedy token for token, sampled in distribution."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from draftsmith.algorithms.drafter import Proposals, Sampler
from draftsmith.decoding import step as step_module
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions, distribution, draw_token
from draftsmith.decoding.verify import Verdict, verify_sampled
from draftsmith.drafts.draft import Draft
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.target import Target
from tests.decoding.oracle import Oracle, decode_with, expected_accept_lengths
from tests.support.tiny import KINDS, tiny_target
from tests.support.tiny_draft import tiny_draft

VOCABULARY = 97
NEW = 20


@cache
def target_of(kind: str) -> Target:
    return tiny_target(kind, vocab_size=VOCABULARY)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(tuple(torch.randint(VOCABULARY, (n,), generator=generator).tolist()) for n in (5, 1, 19, 12, 8))


@cache
def plain_answers(kind: str, new: int = NEW) -> list[list[int]]:
    """Each prompt's plain greedy answer, decoded alone."""
    return [generate(target_of(kind), None, [prompt], max_new_tokens=new)[0].token_ids for prompt in prompts()]


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


# --- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_plain_decoding_equals_the_librarys_own(kind: str) -> None:
    target = target_of(kind)
    for prompt, answer in zip(prompts(), plain_answers(kind), strict=True):
        text = target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
        assert text[0, len(prompt) :].tolist() == answer


@pytest.mark.parametrize(
    ("kind", "layers", "block_size"), [*itertools.product(KINDS, (1, 2, 5), (2, 7, 16)), ("qwen3_moe", 2, 7)]
)
def test_greedy_equals_plain_decoding(kind: str, layers: int, block_size: int) -> None:
    target = target_of(kind)
    draft = tiny_draft(target, num_layers=layers, block_size=block_size, seed=layers)
    batch = generate(target, draft, prompts(), max_new_tokens=NEW)
    assert tokens(batch) == plain_answers(kind)
    assert generate(target, draft, prompts()[:1], max_new_tokens=NEW) == batch[:1]
    assert all(sum(result.accept_lengths) == NEW - 1 for result in batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize("causal", [None, False])
def test_greedy_equals_plain_decoding_with_sliding_window_drafts(kind: str, window: int, causal: bool | None) -> None:
    target = target_of(kind)
    layer_types = ("sliding_attention", "full_attention", "sliding_attention")
    draft = tiny_draft(target, num_layers=3, layer_types=layer_types, sliding_window=window, causal=causal)
    assert tokens(generate(target, draft, prompts(), max_new_tokens=NEW)) == plain_answers(kind)


@pytest.mark.parametrize("block_size", [2, 7, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_plain_decoding_when_blocks_are_accepted(kind: str, block_size: int) -> None:
    """Acceptance of every length, in rows that get out of step with each other, and over targets' sliding windows."""
    target, new, proposals = target_of(kind), 45, block_size - 1
    answers = plain_answers(kind, new)

    def right(row: int, done: int) -> int:
        return (row * 7 + done * 11) % (proposals + 1)

    oracle = Oracle(answers, proposals, VOCABULARY, right)
    request = Request.of(prompts(), max_new_tokens=new, sampling=SamplingOptions(), seed=0)
    results = decode_with(Engine(target, tiny_draft(target, block_size=block_size)), request, oracle)
    assert tokens(results) == answers
    for row, result in enumerate(results):
        expected = expected_accept_lengths(new, proposals, lambda done, row=row: right(row, done))
        assert result.accept_lengths == expected


def test_greedy_equals_plain_decoding_when_the_draft_itself_is_often_right() -> None:
    """A vocabulary of three: a random draft is right every third time, by its own proposals and its own context."""
    target = tiny_target("qwen3", vocab_size=3, seed=5)
    short = [[token % 3 for token in prompt] for prompt in prompts()]
    plain = generate(target, None, short, max_new_tokens=60)
    lengths: set[int] = set()
    for seed in range(3):
        drafted = generate(target, tiny_draft(target, block_size=7, seed=seed), short, max_new_tokens=60)
        assert tokens(drafted) == tokens(plain)
        lengths.update(length for result in drafted for length in result.accept_lengths)
    assert {1, 2, 3} <= lengths


def test_bfloat16_equals_plain_decoding_at_the_verify_width() -> None:
    target = tiny_target("llama", vocab_size=VOCABULARY, dtype=torch.bfloat16)
    draft = tiny_draft(target, block_size=7).to(torch.bfloat16)
    plain = generate(target, None, prompts(), max_new_tokens=40, options=EngineOptions(verify_width=7))
    answers = tokens(plain)
    assert tokens(generate(target, draft, prompts(), max_new_tokens=40)) == answers
    request = Request.of(prompts(), max_new_tokens=40, sampling=SamplingOptions(), seed=0)
    oracle = Oracle(answers, 6, VOCABULARY, lambda row, done: (row + done) % 7)
    assert tokens(decode_with(Engine(target, draft), request, oracle)) == answers


# --- sampling ---------------------------------------------------------------------------------------------------------

SMALL, ROWS, PROMPT = 6, 6_000, (2, 5, 0)
SAMPLINGS = [SamplingOptions(1.0), SamplingOptions(0.7, top_p=0.8, top_k=4)]


@cache
def small_models() -> tuple[Target, Draft]:
    target = tiny_target("qwen3", vocab_size=SMALL, hidden_size=16, num_layers=2, seed=11)
    return target, tiny_draft(target, num_layers=1, block_size=4, head_dim=4, intermediate_size=16, seed=17)


@dataclass
class SampledProposals:
    """A method that draws each slot from the draft's distribution; it may hold some back, by the token before."""

    draft: Draft
    ends: TargetEnds
    num_proposals: int = 3
    hold_back: bool = False

    def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposals:
        drawn = [sampler(self.draft.logits(hidden[:, slot + 1], self.ends), slot) for slot in range(self.num_proposals)]
        count = anchor_ids % (self.num_proposals + 1) if self.hold_back else None
        q = [q for _, q in drawn if q is not None]
        return Proposals(torch.stack([ids for ids, _ in drawn], dim=1), torch.stack(q, dim=1), count)


def small_engine(proposals: str) -> Engine:
    target, draft = small_models()
    engine = Engine(target, None if proposals == "none" else draft)
    if proposals.startswith("sampled"):
        engine.drafter.filler = SampledProposals(draft, target.ends, hold_back=proposals == "sampled, held back")
    return engine


def decode_small(
    engine: Engine, sampling: SamplingOptions, new: int, rows: int = ROWS, seed: int = 1
) -> list[Generation]:
    return engine.decode(Request.of([PROMPT] * rows, max_new_tokens=new, sampling=sampling, seed=seed))


@cache
def exact_distribution(sampling: SamplingOptions) -> Tensor:
    """The probability of every triple of first tokens, by enumeration with the model's own forward: [6 * 6 * 6]."""
    target, _ = small_models()
    pairs = torch.tensor(list(itertools.product(range(SMALL), repeat=2)))
    texts = torch.cat((torch.tensor(PROMPT).expand(len(pairs), -1), pairs), dim=1)
    with torch.no_grad():
        p = distribution(target.model(texts).logits[:, len(PROMPT) - 1 :], sampling).double()  # [36, 3, 6]
    rows = torch.arange(len(pairs))
    prefix = p[rows, 0, pairs[:, 0]] * p[rows, 1, pairs[:, 1]]
    return (prefix[:, None] * p[:, 2]).flatten()


def p_value(results: Sequence[Generation], sampling: SamplingOptions) -> float:
    """Chi-square of the first three tokens against enumeration; triples expected less than 5 times are one cell."""
    first = torch.tensor([result.token_ids[:3] for result in results])
    cells = first @ torch.tensor([SMALL * SMALL, SMALL, 1])
    found = torch.bincount(cells, minlength=SMALL**3).double()
    expected = exact_distribution(sampling) * len(results)
    assert (found[expected == 0] == 0).all()
    rare = expected < 5
    found = torch.cat((found[~rare], found[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    kept = expected > 0
    assert kept.sum() > 8
    return float(stats.chisquare(found[kept].numpy(), expected[kept].numpy(), sum_check=False).pvalue)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=1", "T=0.7, top-k, top-p"])
@pytest.mark.parametrize("proposals", ["none", "deterministic", "sampled", "sampled, held back"])
def test_sampled_output_has_the_targets_distribution(proposals: str, sampling: SamplingOptions) -> None:
    results = decode_small(small_engine(proposals), sampling, new=4)
    assert p_value(results, sampling) > 1e-3
    if proposals != "none":
        lengths = {length for result in results for length in result.accept_lengths}
        assert lengths == {1, 2, 3}


@pytest.mark.parametrize("candidates", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=1", "T=0.7, top-k, top-p"])
def test_a_selectors_path_has_the_targets_distribution_beside_greedy_rows(
    sampling: SamplingOptions, candidates: int
) -> None:
    """With fewer candidates than top-k leaves tokens, too."""
    target, _ = small_models()
    head = {"conv_kernel_size": 4, "conv_group_size": 2, "selector_rank": 3, "selector_top_k": candidates}
    sizes = {"num_layers": 1, "block_size": 4, "head_dim": 4, "intermediate_size": 16}
    engine = Engine(target, tiny_draft(target, architecture="dflash2", head=head, seed=17, **sizes))
    drawn = engine.submit(Request.of([PROMPT] * 3_000, max_new_tokens=4, sampling=sampling, seed=5))
    greedy = engine.submit(Request.of([PROMPT] * 3, max_new_tokens=4, sampling=SamplingOptions(), seed=5))
    while not engine.idle:
        engine.step()
    results = [answer.generation() for answer in drawn]
    assert p_value(results, sampling) > 1e-3
    assert {length for result in results for length in result.accept_lengths} == {1, 2, 3}
    plain = generate(target, None, [PROMPT], max_new_tokens=4)
    assert [answer.generation().token_ids for answer in greedy] == tokens(plain) * 3


def verify_forgetting(
    p: Tensor, proposed: Tensor, q: Tensor, count: Tensor | None, uniform: Tensor, accept_uniform: Tensor
) -> Verdict:
    """Mutated: after a rejection it draws from p, the rejected token included."""
    right = verify_sampled(p, proposed, q, count, uniform, accept_uniform)
    last = right.count[:, None] - 1
    return Verdict(right.token_ids.scatter(1, last, draw_token(p, uniform).gather(1, last)), right.count)


def verify_trusting(
    p: Tensor, proposed: Tensor, q: Tensor, count: Tensor | None, uniform: Tensor, accept_uniform: Tensor
) -> Verdict:
    """Mutated: it takes q for p, and accepts whatever is proposed."""
    return verify_sampled(p, proposed, q, count, uniform, torch.zeros_like(accept_uniform))


@pytest.mark.parametrize("mutated", [verify_forgetting, verify_trusting])
def test_a_wrong_verifier_is_caught(mutated: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "verify_sampled", mutated)
    results = decode_small(small_engine("sampled"), SAMPLINGS[0], new=4, rows=5000)
    assert p_value(results, SAMPLINGS[0]) < 1e-6


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T=1", "T=0.7, top-k, top-p"])
def test_deterministic_proposals_give_the_very_tokens_of_plain_sampling(sampling: SamplingOptions) -> None:
    plain = decode_small(small_engine("none"), sampling, new=12, rows=300)
    drafted = decode_small(small_engine("deterministic"), sampling, new=12, rows=300)
    assert tokens(drafted) == tokens(plain)
    other = decode_small(small_engine("none"), sampling, new=12, rows=300, seed=2)
    assert tokens(other) != tokens(plain)


def test_a_seed_repeats_and_no_seed_follows_torch() -> None:
    target, draft = small_models()
    settings: dict[str, Any] = {"max_new_tokens": 15, "temperature": 1.0}

    def sample(seed: int | None) -> list[Generation]:
        return generate(target, draft, [PROMPT] * 3, seed=seed, **settings)

    assert sample(4) == sample(4)
    assert sample(4) != sample(5)
    assert sample(None) != sample(None)
    torch.manual_seed(9)
    first = sample(None)
    torch.manual_seed(9)
    assert sample(None) == first
