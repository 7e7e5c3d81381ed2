"""A kind of layer registered from outside, whose state cannot be cut back: lossless through the engine, because passes
say which tokens are a row's own and `keep` says which stand."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoding.answer import Answer
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import Generation, generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.errors import DraftsmithError
from draftsmith.targets.passes import CachedPass
from draftsmith.targets.target import Target
from tests.decoding.oracle import Oracle, decode_with
from tests.decoding.reference import plain_greedy
from tests.support.recurrent_layer import Recurrent, StateCache, toy_hybrid
from tests.support.tiny_draft import tiny_draft

NEW = 24
GREEDY = SamplingOptions()
SAMPLED = SamplingOptions(0.9, top_p=0.95, top_k=30)


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_hybrid()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(97, (length,), generator=generator).tolist() for length in (5, 1, 19, 12, 8)]


@pytest.fixture(scope="module")
def gold(target: Target) -> list[list[int]]:
    """Greedy decoding by whole forwards of the model's own code."""
    return [plain_greedy(target.model, prompt, NEW) for prompt in prompts()]


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def request(sampling: SamplingOptions, some: list[list[int]] | None = None) -> Request:
    return Request.of(some or prompts(), max_new_tokens=NEW, sampling=sampling, seed=7)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"slots": 2, "prefill_chunk": 3},
    {"slots": 1, "prefill_rows": 1},
    {"slots": 3, "steps_ahead": 2, "prefill_chunk": 4},
    {"slots": 5, "batch_buckets": (1, 2, 4), "context_bucket": 8},
]


@pytest.mark.parametrize("options", [*OPTIONS, {"verify_width": 4}, {"verify_width": 3, "slots": 2}], ids=str)
def test_plain_decoding_is_the_models_own(target: Target, gold: list[list[int]], options: dict[str, Any]) -> None:
    assert tokens(Engine(target, None, EngineOptions(**options)).decode(request(GREEDY))) == gold


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_speculative_decoding_is_plain_decoding(target: Target, gold: list[list[int]], options: dict[str, Any]) -> None:
    draft = tiny_draft(target, block_size=6)
    assert tokens(Engine(target, draft, EngineOptions(**options)).decode(request(GREEDY))) == gold
    plain = tokens(Engine(target).decode(request(SAMPLED)))
    assert tokens(Engine(target, draft, EngineOptions(**options)).decode(request(SAMPLED))) == plain != gold


def test_a_draft_of_its_own_that_is_often_right() -> None:
    small = toy_hybrid(seed=4, vocab_size=3)
    short = [[token % 3 for token in prompt] for prompt in prompts()]
    plain = [plain_greedy(small.model, prompt, NEW) for prompt in short]
    lengths: set[int] = set()
    for seed in range(2):
        found = generate(small, tiny_draft(small, block_size=6, seed=seed), short, max_new_tokens=NEW)
        assert tokens(found) == plain
        lengths |= {length for one in found for length in one.accept_lengths}
    assert len(lengths) > 1


def oracle(gold: list[list[int]]) -> Oracle:
    """Acceptance of every length, in rows that get out of step."""
    return Oracle(gold, 5, 97, lambda row, done: (row * 7 + done * 11) % 6)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_any_number_of_tokens_may_stand(target: Target, sampling: SamplingOptions) -> None:
    plain = tokens(Engine(target).decode(request(sampling)))
    found = decode_with(Engine(target, tiny_draft(target)), request(sampling), oracle(plain))
    assert tokens(found) == plain
    assert {1, 2, 3, 4, 5, 6} <= {length for one in found for length in one.accept_lengths}


def test_slots_are_used_again_and_rows_are_cancelled(target: Target, gold: list[list[int]]) -> None:
    """While prompts are read, while rows are in work, and in the slots that they leave."""
    draft = tiny_draft(target, block_size=6)
    engine = Engine(target, draft, EngineOptions(slots=2, prefill_chunk=2, max_length=64, steps_ahead=1))
    answers: list[Answer] = []
    for prompt in [*prompts(), *prompts()]:
        answers += engine.submit(request(GREEDY, [prompt]))
    cancelled = []
    for round_number in range(400):
        engine.step()
        if round_number in (1, 6, 17):  # in work or still being read
            victim = next(a for a in answers if not a.finished and a in engine.scheduler.occupants)
            engine.cancel(victim)
            cancelled.append(answers.index(victim))
        if all(answer.finished for answer in answers):
            break
    assert len(cancelled) == 3
    for index, answer in enumerate(answers):
        wanted = gold[index % 5]
        if index in cancelled:
            assert answer.token_ids == wanted[: len(answer.token_ids)]
        else:
            assert answer.token_ids == wanted, index


# --- what it rests on -------------------------------------------------------------------------------------------------


def test_keeping_all_of_a_pass_is_seen(target: Target, gold: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutated: rejected tokens stay in the state."""
    keep = StateCache.keep
    monkeypatch.setattr(
        StateCache,
        "keep",
        lambda self, count, path: keep(self, torch.where(count > 0, self.of_tokens.shape[1], 0), path),
    )
    found = decode_with(Engine(target, tiny_draft(target)), request(GREEDY), oracle(gold))
    assert tokens(found) != gold


def test_padding_that_counts_is_seen(target: Target, gold: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutated: all tokens of a pass are a row's own, padding and slots that are computed along among them."""
    start = CachedPass.__init__

    def all_valid(self: CachedPass, cache: Any, positions: Tensor, *, valid: Tensor, **options: Any) -> None:
        start(self, cache, positions, valid=torch.full_like(valid, positions.shape[1]), **options)

    monkeypatch.setattr(CachedPass, "__init__", all_valid)
    assert tokens(generate(target, None, prompts(), max_new_tokens=NEW)) != gold


def test_a_layer_that_did_not_run_over_the_cache_is_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recurrent, "running", lambda *_: nullcontext())
    with pytest.raises(DraftsmithError, match=r"did not run its layers \[0, 2\] over the cache"):
        generate(target, None, [[1, 2]], max_new_tokens=2)
