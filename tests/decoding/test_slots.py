"""Continuous batching: rows come and go, the host looks late, and no row's answer depends on any of it."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftsmith.decoding.answer import Answer
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.pool import Slots
from draftsmith.decoding.prefill import SMALL_PASS, WIDTHS, PrefillGroup, graph_width, groups_of
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import RowSampling, SamplingBounds, SamplingOptions, distribution
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

SAMPLINGS = [SamplingOptions(), SamplingOptions(0.9), SamplingOptions(1.3, top_k=7), SamplingOptions(0.8, 0.7, 30)]


def requests(count: int = 7, seed: int = 0) -> list[Request]:
    """One prompt each, of various lengths, with their own limits, stop ids, seeds and sampling."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        prompt = torch.randint(97, (1 + (7 * i) % 23,), generator=generator).tolist()
        stop = torch.randint(97, (i % 4,), generator=generator).tolist()
        made.append(
            Request.of(
                [prompt], max_new_tokens=3 + (5 * i) % 13, sampling=SAMPLINGS[i % 4], stop_token_ids=stop, seed=i
            )
        )
    return made


@pytest.fixture(scope="module")
def expected(target: Target, draft: Draft) -> dict[bool, list[Generation]]:
    """Each request's answer, decoded alone, with the draft and without."""
    return {drafted: [alone(target, draft if drafted else None, r) for r in requests()] for drafted in (True, False)}


def alone(target: Target, draft: Draft | None, request: Request) -> Generation:
    return Engine(target, draft).decode(request)[0]


def run(engine: Engine, answers: Sequence[Answer]) -> list[Generation]:
    while not all(answer.finished for answer in answers):
        engine.step()
    return [answer.generation() for answer in answers]


@pytest.mark.parametrize(
    ("drafted", "options"),
    [
        (True, {"slots": 1}),
        (True, {"slots": 3, "steps_ahead": 1}),
        (False, {"slots": 3, "steps_ahead": 2}),
        (True, {"slots": 4, "steps_ahead": 3, "prefill_chunk": 3}),
        (True, {"slots": 7, "steps_ahead": 1, "batch_buckets": (1, 2, 4)}),
        (False, {"slots": 2, "prefill_rows": 1, "context_bucket": 8}),
    ],
)
def test_rows_that_take_turns_answer_as_they_do_alone(
    target: Target,
    draft: Draft,
    expected: dict[bool, list[Generation]],
    drafted: bool,
    options: dict[str, object],
) -> None:
    engine = Engine(target, draft if drafted else None, EngineOptions.model_validate(options))
    answers = [answer for request in requests() for answer in engine.submit(request)]
    assert run(engine, answers) == expected[drafted]
    assert engine.idle
    late = [answer for request in requests()[2:4] for answer in engine.submit(request)]
    assert run(engine, late) == expected[drafted][2:4]


def test_requests_join_while_others_go_on(target: Target, draft: Draft, expected: dict[bool, list[Generation]]) -> None:
    engine = Engine(target, draft, EngineOptions(slots=3, max_length=64, steps_ahead=1))
    answers: list[Answer] = []
    working = 0
    for request in requests():
        answers += engine.submit(request)
        engine.step()
        engine.step()
        assert engine.runner.pool is not None
        working = max(working, sum(1 for a in engine.scheduler.occupants if a is not None and len(a.token_ids) > 1))
    assert working > 1
    assert run(engine, answers) == expected[True]


def caches_of(engine: Engine, answer: Answer) -> torch.Tensor:
    """All that target and draft keep of a row."""
    assert engine.runner.pool is not None
    slot, state, cache = (
        engine.scheduler.occupants.index(answer),
        engine.runner.pool.state,
        engine.runner.pool.target_cache,
    )
    length = int(state.length[slot]) - 1
    parts = [t[slot, :, :length] for t in cache.tensors]
    parts += list(engine.runner.pool.draft.joint[:, :, slot, :, :length].flatten(0, 1))
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[3]])
def test_a_row_is_the_same_to_the_last_bit_beside_any_neighbours(
    target: Target, draft: Draft, sampling: SamplingOptions
) -> None:
    """At a fixed number of slots, in any of them: its caches, and with them whatever comes of them."""
    row = Request.of([[5, 3, 8, 1, 1, 4]], max_new_tokens=18, sampling=sampling, seed=[77])
    found, caches = [], []
    for neighbours in (0, 1, 3):
        engine = Engine(target, draft, EngineOptions(slots=4, max_length=64, prefill_rows=1))
        for request in requests(neighbours, seed=neighbours):
            engine.submit(request)
        (answer,) = engine.submit(row)
        while len(answer.token_ids) < 9:
            engine.step()
        caches.append(caches_of(engine, answer))
        found += run(engine, [answer])
    assert found[0] == found[1] == found[2]
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0], caches[2])


def test_tokens_stream_to_several_readers(target: Target, draft: Draft, expected: dict[bool, list[Generation]]) -> None:
    engine = Engine(target, draft, EngineOptions(slots=2, steps_ahead=1))

    async def read(request: Request) -> list[int]:
        (answer,) = engine.submit(request)
        return [token async for token in engine.stream(answer)]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(read(request) for request in requests()[:5]))

    assert asyncio.run(all_of_them()) == [generation.token_ids for generation in expected[True][:5]]


def test_a_step_returns_what_it_added_to_which_answers(
    target: Target, draft: Draft, expected: dict[bool, list[Generation]]
) -> None:
    engine = Engine(target, draft, EngineOptions(slots=3, steps_ahead=1))
    answers = [answer for request in requests() for answer in engine.submit(request)]
    engine.cancel(answers[2])
    given: dict[Answer, list[int]] = {answer: [] for answer in answers}
    ended: list[Answer] = []
    while not engine.idle:
        for delta in engine.step():
            assert not ended or delta.answer not in ended
            given[delta.answer] += delta.token_ids
            if delta.last:
                ended.append(delta.answer)
                assert (delta.finish_reason, delta.fault) == (delta.answer.finish_reason, None)
    assert set(ended) == {answer for answer in answers if answer is not answers[2]}
    assert [given[answer] for answer in ended] == [answer.token_ids for answer in ended]
    assert [given[answers[i]] for i in (0, 1, 3)] == [expected[True][i].token_ids for i in (0, 1, 3)]
    assert given[answers[2]] == []


def test_slots_that_were_prepared_are_kept(
    target: Target, draft: Draft, expected: dict[bool, list[Generation]]
) -> None:
    engine = Engine(target, draft)
    engine.prepare(slots=2, max_length=60)
    assert engine.preparations == (1, 0)
    found = [engine.decode(request)[0] for request in requests()[:3]]
    assert found == expected[True][:3]
    assert engine.preparations == (1, 0)
    (answer,) = engine.submit(Request.of([[3] * 70], max_new_tokens=2, sampling=SamplingOptions(), seed=0))
    with pytest.raises(DraftsmithError, match="slots are prepared while rows are waiting or in work"):
        engine.prepare(slots=2, max_length=60)
    run(engine, [answer])
    assert engine.preparations == (2, 0), "a row that does not fit has longer slots made"
    with pytest.raises(DraftsmithError, match="2 slots are to be prepared, and the option slots is 3"):
        Engine(target, draft, EngineOptions(slots=3)).prepare(slots=2, max_length=60)


def test_a_cancelled_answer_makes_room_and_nothing_else(
    target: Target, draft: Draft, expected: dict[bool, list[Generation]]
) -> None:
    engine = Engine(target, draft, EngineOptions(slots=2, prefill_chunk=2, steps_ahead=1))
    answers = [answer for request in requests() for answer in engine.submit(request)]
    engine.step()
    engine.cancel(answers[1])  # in work, or still being read
    engine.cancel(answers[6])  # waiting
    kept = [i for i in range(7) if i not in (1, 6)]
    run(engine, [answers[i] for i in kept])
    assert [answers[i].generation() for i in kept] == [expected[True][i] for i in kept]
    assert answers[1].token_ids == expected[True][1].token_ids[: len(answers[1].token_ids)]
    with pytest.raises(DraftsmithError, match="prompt 0 is cancelled"):
        answers[6].generation()


def test_a_row_that_meets_nan_leaves_the_others_alone(target: Target) -> None:
    broken = tiny_target("qwen3")
    broken.ends.embedding_weight[3] = float("nan")
    engine = Engine(broken, None, EngineOptions(slots=2, steps_ahead=1))
    answers = engine.submit(Request.of([[1, 2], [3, 5]], max_new_tokens=9, sampling=SamplingOptions()))
    while not answers[1].finished:
        engine.step()
    with pytest.raises(DraftsmithError, match=r"target's logits are NaN or infinite for prompts \[1\]"):
        answers[1].generation()
    (next_one,) = engine.submit(Request.of([[4, 4]], max_new_tokens=9, sampling=SamplingOptions()))
    plain = generate(target, None, [[1, 2], [4, 4]], max_new_tokens=9)
    if all(3 not in answer.token_ids for answer in plain):
        assert run(engine, [answers[0], next_one]) == plain


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize(
    ("prompt", "chunk", "steps"),
    [([3, 6, 6], 512, 3), ([5, 3] + [6] * 20, 4, 1)],
    ids=["its first token, computed along after its end", "cancelled while it is read"],
)
def test_what_a_broken_row_leaves_in_its_slot_is_not_the_next_ones(
    target: Target, draft: Draft, prompt: list[int], chunk: int, steps: int, steps_ahead: int
) -> None:
    broken = tiny_target("qwen3")
    broken.ends.embedding_weight[3] = float("nan")
    engine = Engine(broken, draft, EngineOptions(slots=2, max_length=64, prefill_chunk=chunk, steps_ahead=steps_ahead))

    def submit(prompt: list[int], most: int) -> Answer:
        return engine.submit(Request.of([prompt], max_new_tokens=most, sampling=SamplingOptions(), seed=[0]))[0]

    submit([1, 2], 45)  # goes on, so that steps are launched
    engine.step()
    bad = submit(prompt, 9)
    for _ in range(steps):
        engine.step()
    engine.cancel(bad)
    assert engine.runner.pool is not None
    while engine.scheduler.occupants[1] is not None:
        engine.step()
    following = submit([4], 9)
    plain = generate(target, None, [[4]], max_new_tokens=9)
    assert 3 not in plain[0].token_ids
    assert run(engine, [following])[0].token_ids == plain[0].token_ids


def test_what_does_not_fit_a_slot_is_refused(target: Target) -> None:
    engine = Engine(target, None, EngineOptions(slots=2, max_length=20))
    with pytest.raises(DraftsmithError, match=r"prompt 0 has 12 tokens and may become 22 long.* room for 20"):
        engine.submit(Request.of([[1] * 12], max_new_tokens=10, sampling=SamplingOptions()))
    with pytest.raises(DraftsmithError, match="graphs is on, but the target is on cpu"):
        Engine(target, None, EngineOptions(graphs="on"))


# --- sampling row by row ----------------------------------------------------------------------------------------------


def test_rows_of_different_options_get_the_distributions_of_their_own() -> None:
    options = [*SAMPLINGS[1:], SamplingOptions(1e-40), SamplingOptions(2.0, top_p=0.3), SamplingOptions(1.0, top_k=500)]
    logits = 3 * torch.randn(len(options), 3, 40)
    together = distribution(logits, RowSampling.of(options))
    for row, one in enumerate(options):
        assert torch.equal(together[row : row + 1], distribution(logits[row : row + 1], one)), one
    for first, second in itertools.pairwise(range(len(options))):
        assert not torch.equal(together[first], distribution(logits[first : first + 1], options[second])[0])


def test_greedy_rows_beside_rows_whose_proposals_are_drawn(target: Target) -> None:
    """A method that draws its proposals from a distribution of its own: each row is verified by its own rule."""
    head = {"markov_rank": 3, "markov_head_type": "rnn", "enable_confidence_head": False}
    draft = tiny_draft(target, architecture="dspark", head={**head, "confidence_head_with_markov": False})
    asked = [Request.of([[5, 3, i]], max_new_tokens=12, sampling=SAMPLINGS[i], seed=[i]) for i in (0, 1, 0, 3)]
    engine = Engine(target, draft, EngineOptions(slots=4, max_length=32))
    answers = [answer for request in asked for answer in engine.submit(request)]
    assert run(engine, answers) == [alone(target, draft, request) for request in asked]
    assert answers[0].token_ids == answers[2].token_ids == alone(target, None, asked[0]).token_ids


# --- prefill ----------------------------------------------------------------------------------------------------------


def answers_of(lengths: list[int]) -> list[Answer]:
    request = Request.of([[1] * length for length in lengths], max_new_tokens=1, sampling=SamplingOptions())
    return [Answer(request, i, 10_000) for i in range(len(lengths))]


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prompts_are_read_whole_and_with_little_padding(chunk: int) -> None:
    lengths = torch.randint(1, 900, (40,)).tolist()
    (group,) = groups_of(list(range(40)), answers_of(lengths), None)
    computed, passes = 0, 0
    while group.answers:
        rows, width = len(group.answers), group.next_width(chunk)
        assert 1 <= width <= chunk
        assert group.begin + width <= max(lengths)
        computed += rows * width
        passes += 1
        group.advance(width)
    assert sum(lengths) <= computed <= 1.25 * sum(lengths) + 256 * passes
    assert passes <= 900 // chunk + 40


def test_widths_for_graphs_are_few_and_pad_little() -> None:
    generator = torch.Generator().manual_seed(5)
    found = set()
    for most, rows in itertools.product((1, 9, 64, 130, 512, 4000), (1, 3, 8, 33)):
        for width in torch.randint(1, most + 1, (40,), generator=generator).tolist():
            padded = graph_width(width, rows, most)
            if padded is None:
                assert width > WIDTHS[-1] or rows * width > SMALL_PASS - rows * 128
                continue
            assert width <= padded <= min(most, width + 127)
            assert rows * padded <= SMALL_PASS
            assert padded in WIDTHS or padded == most
            found.add(padded)
    assert found == {*WIDTHS, 1, 9, 130}
    assert graph_width(65, 1, 512) != graph_width(64, 1, 512)


@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk": 7}, {"slots": 2, "prefill_rows": 1}, {"max_length": 90, "slots": 3}], ids=str
)
def test_padded_passes_change_nothing(target: Target, draft: Draft, options: dict[str, object]) -> None:
    """The widths of a GPU, on a CPU: also where prompts nearly fill their slots, and in slots that are used again."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(97, (length,), generator=generator).tolist() for length in (5, 70, 84, 1, 66, 31)]
    request = Request.of(prompts, max_new_tokens=6, sampling=SAMPLINGS[0])
    expected = Engine(target, draft).decode(request)
    engine = Engine(target, draft, EngineOptions.model_validate(options))
    engine.scheduler.on_gpu = True
    widths: list[tuple[int, int]] = []
    prefill = engine.runner.stepper.prefill

    def watched(slots: Slots, width: int, extent: int, bounds: SamplingBounds | None) -> None:
        widths.append((width, int(slots.state.read[0])))
        assert engine.runner.pool is not None
        readable = min(engine.scheduler.shape.reserved, slots.state.tokens.shape[1])  # there are ids and cache entries
        assert int(slots.state.read.max()) + width <= readable <= extent
        prefill(slots, width, extent, bounds)

    engine.runner.stepper.prefill = watched  # type: ignore[method-assign]
    assert engine.decode(request) == expected
    room = 90 + draft.config.block.size  # of a slot that the longest prompt fills; a pass from token 64 on has the rest
    assert {width for width, _ in widths} <= {*WIDTHS, options.get("prefill_chunk"), room, room - 64}
    changed = Request.of([*prompts[:2], [*prompts[2][:40], 3, *prompts[2][41:]], *prompts[3:]], max_new_tokens=6,
                         sampling=SAMPLINGS[0])  # fmt: skip
    found = engine.decode(changed)
    assert found == Engine(target, draft).decode(changed)
    assert found[2] != expected[2]
    assert found[:2] == expected[:2]


def test_padding_stays_in_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tiny_target("qwen3", max_position_embeddings=80)
    request = Request.of([[7] * 78, [5, 6]], max_new_tokens=9, sampling=SAMPLINGS[0])
    engine = Engine(small)
    engine.scheduler.on_gpu = True
    forward, seen = small.forward, []

    def watched(ids: torch.Tensor, positions: torch.Tensor, **options: Any) -> Any:
        seen.append(int(positions.max()))
        return forward(ids, positions, **options)

    monkeypatch.setattr(small, "forward", watched)
    found = engine.decode(request)
    assert max(seen) == 79
    assert found == Engine(small).decode(request)


def test_slots_with_room_beyond_the_window(draft: Draft) -> None:
    """A fused target knows its rope for little more than its window, and passes over prompts see whole slots."""
    small = tiny_target("qwen3", max_position_embeddings=80)
    small.fuse()
    request = Request.of([[7] * 78, [5, 6]], max_new_tokens=9, sampling=SAMPLINGS[0])
    engine = Engine(small, draft, EngineOptions(max_length=1000))
    engine.scheduler.on_gpu = True
    assert engine.decode(request) == Engine(small, draft).decode(request)


def test_groups_are_neighbouring_slots_and_not_too_many_rows() -> None:
    answers = answers_of([3, 9, 5, 5, 2])
    groups = groups_of([0, 1, 4, 5, 6], answers, 2)
    assert [(group.first, [len(a.prompt) for a in group.answers]) for group in groups] == [
        (0, [9, 5]),
        (4, [5, 3]),
        (6, [2]),
    ]
    assert PrefillGroup(0, answers_of([4])).next_width(3) == 3
