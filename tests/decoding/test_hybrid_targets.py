"""Targets with recurrent layers are decoded losslessly: plainly, speculatively, in batches, chunk by chunk."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.targets.target import Target
from tests.decoding.oracle import Oracle, decode_with
from tests.support.hybrids import MODELS, tiny_target_of
from tests.support.tiny_draft import tiny_draft

NEW = 14


@cache
def target_of(model_type: str) -> Target:
    return tiny_target_of(model_type)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(tuple(torch.randint(97, (n,), generator=generator).tolist()) for n in (5, 40, 1, 23, 80))


@cache
def gold(model_type: str) -> list[list[int]]:
    """Greedy answers by the model's own forward over the whole text, without any cache."""
    model, answers = target_of(model_type).model, []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def request(texts: Sequence[Sequence[int]]) -> Request:
    return Request.of(texts, max_new_tokens=NEW, sampling=SamplingOptions())


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 7}, {"slots": 2}, {"verify_width": 4}])
@pytest.mark.parametrize("model_type", MODELS)
def test_plain_decoding_is_the_models_own(model_type: str, options: dict[str, Any]) -> None:
    found = generate(
        target_of(model_type), None, prompts(), max_new_tokens=NEW, stop_token_ids=(), options=EngineOptions(**options)
    )
    assert [one.token_ids for one in found] == gold(model_type)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 7, "slots": 2}])
@pytest.mark.parametrize("model_type", MODELS)
def test_speculation_gives_the_same_however_far_proposals_are_right(model_type: str, options: dict[str, Any]) -> None:
    """Verifies of seven tokens, of which one to seven stand; rejected ones leave no trace in any state."""
    target, answers = target_of(model_type), gold(model_type)
    oracle = Oracle(answers, 6, 97, lambda row, done: (3 * row + 5 * done) % 7)
    engine = Engine(target, tiny_draft(target), EngineOptions(**options))
    found = decode_with(engine, request(prompts()), oracle)
    assert [one.token_ids for one in found] == answers
    assert max(length for one in found for length in one.accept_lengths) > 3


@pytest.mark.parametrize("model_type", MODELS)
def test_a_slots_next_text_sees_nothing_of_a_cancelled_one(model_type: str) -> None:
    engine = Engine(target_of(model_type), None, EngineOptions(slots=1, max_length=128))
    (first,) = engine.submit(request([prompts()[1]]))
    for _ in range(4):
        engine.step()
    engine.cancel(first)
    answers = engine.submit(request([prompts()[0], prompts()[2]]))
    while not engine.idle:
        engine.step()
    assert [answer.generation().token_ids for answer in answers] == [gold(model_type)[0], gold(model_type)[2]]
