from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.blocks.anchors import Anchors
from draftsmith.blocks.build import build_blocks
from draftsmith.blocks.masks import dense_attention
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import Generation, generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingBounds, SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target
from tests.decoding.oracle import Oracle, decode_with, expected_accept_lengths
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

VOCABULARY = 97
LENGTHS = (3, 1, 17, 8, 5)


def random_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def greedy(prompts: list[list[int]], max_new_tokens: int, stop: Sequence[int] = ()) -> Request:
    return Request.of(prompts, max_new_tokens=max_new_tokens, sampling=SamplingOptions(), stop_token_ids=stop, seed=0)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


# --- acceptance of every length ---------------------------------------------------------------------------------------


def every_length(row: int, done: int) -> int:
    return (row * 5 + done * 3 + done // 4) % 7


@pytest.mark.parametrize("num_proposals", [1, 2, 6, 15])
def test_accept_lengths_of_every_size_leave_the_tokens_as_they_are(
    target: Target, draft: Draft, num_proposals: int
) -> None:
    prompts, new = random_prompts(), 60
    answers = tokens(generate(target, None, prompts, max_new_tokens=new))
    oracle = Oracle(answers, num_proposals, VOCABULARY, lambda row, done: every_length(row, done) % (num_proposals + 1))
    results = decode_with(Engine(target, draft), greedy(prompts, new), oracle)
    assert tokens(results) == answers
    seen = set()
    for row, result in enumerate(results):
        right = lambda done, row=row: every_length(row, done) % (num_proposals + 1)  # noqa: E731
        assert result.accept_lengths == expected_accept_lengths(new, num_proposals, right)
        assert result.finish_reason == "length"
        seen.update(result.accept_lengths)
    assert seen == set(range(1, min(num_proposals, 6) + 2))


def test_full_blocks_commit_the_verify_width(target: Target, draft: Draft) -> None:
    prompts = random_prompts()
    answers = tokens(generate(target, None, prompts, max_new_tokens=43))
    results = decode_with(Engine(target, draft), greedy(prompts, 43), Oracle(answers, 6, VOCABULARY, lambda *_: 6))
    assert tokens(results) == answers
    assert all(result.accept_lengths == [7] * 6 for result in results)


def test_proposals_in_the_wrong_slots_are_caught_by_accept_lengths(target: Target, draft: Draft) -> None:
    prompts = random_prompts()
    answers = tokens(generate(target, None, prompts, max_new_tokens=43))
    for shift in (-1, 1):
        shifted = Oracle(answers, 6, VOCABULARY, lambda *_: 6, shift=shift)
        results = decode_with(Engine(target, draft), greedy(prompts, 43), shifted)
        assert tokens(results) == answers  # still lossless
        lengths = [length for result in results for length in result.accept_lengths]
        assert sum(lengths) / len(lengths) < 2


def test_only_so_many_proposals_count_as_the_proposer_says(target: Target, draft: Draft) -> None:
    prompts = random_prompts()
    answers = tokens(generate(target, None, prompts, max_new_tokens=40))

    def worth(row: int, done: int) -> int:
        return (row + done) % 5

    oracle = Oracle(answers, 6, VOCABULARY, lambda *_: 4, count=worth)
    results = decode_with(Engine(target, draft), greedy(prompts, 40), oracle)
    assert tokens(results) == answers
    for row, result in enumerate(results):
        count = lambda done, row=row: worth(row, done)  # noqa: E731
        assert result.accept_lengths == expected_accept_lengths(40, 6, lambda done: 4, count)


# --- stops and limits -------------------------------------------------------------------------------------------------


def test_limits_cut_inside_blocks(target: Target, draft: Draft) -> None:
    prompts = random_prompts()
    answers = tokens(generate(target, None, prompts, max_new_tokens=30))
    for new in range(1, 20):
        oracle = Oracle(answers, 6, VOCABULARY, lambda *_: 6)
        results = decode_with(Engine(target, draft), greedy(prompts, new), oracle)
        assert tokens(results) == [answer[:new] for answer in answers]
        assert all(result.finish_reason == "length" for result in results)
        assert all(sum(result.accept_lengths) == new - 1 for result in results)
        assert all(result.accept_lengths == expected_accept_lengths(new, 6, lambda done: 6) for result in results)


def test_stops_cut_inside_blocks_wherever_they_fall(target: Target, draft: Draft) -> None:
    (prompt,) = random_prompts([9], seed=4)
    (answer,) = tokens(generate(target, None, [prompt], max_new_tokens=30))
    firsts = [place for place, token in enumerate(answer) if token not in answer[:place]]
    assert len(firsts) > 10
    for place in firsts:
        unused = next(token for token in range(VOCABULARY) if token not in answer)
        later = answer[firsts[-1]]
        oracle = Oracle([answer], 6, VOCABULARY, lambda *_: 6)
        stop = [unused, later, answer[place]]
        (result,) = decode_with(Engine(target, draft), greedy([prompt], 30, stop), oracle)
        assert result.token_ids == answer[: place + 1]
        assert result.finish_reason == "stop"
        assert result.accept_lengths == expected_accept_lengths(place + 1, 6, lambda done: 6)
        (plain,) = generate(target, None, [prompt], max_new_tokens=30, stop_token_ids=stop)
        assert (plain.token_ids, plain.finish_reason) == (result.token_ids, "stop")
        assert plain.accept_lengths == [1] * place


def test_stop_ids_in_the_prompt_stop_nothing(target: Target, draft: Draft) -> None:
    (prompt,) = random_prompts([9], seed=4)
    (answer,) = generate(target, None, [prompt], max_new_tokens=12)
    stop = [token for token in prompt if token not in answer.token_ids]
    assert stop
    (result,) = generate(target, draft, [prompt], max_new_tokens=12, stop_token_ids=stop)
    assert (result.token_ids, result.finish_reason) == (answer.token_ids, "length")


def test_rows_end_at_the_targets_window_and_nothing_goes_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama", max_position_embeddings=24)
    draft = tiny_draft(target, block_size=7)
    prompts = random_prompts([10, 23, 2])
    furthest = []
    forward = Target.forward

    def spy(self: Target, input_ids: Tensor, positions: Tensor, **options: Any) -> Any:
        furthest.append(int(positions.max()))
        return forward(self, input_ids, positions, **options)

    monkeypatch.setattr(Target, "forward", spy)
    plain = generate(target, None, prompts, max_new_tokens=18)
    assert [len(answer.token_ids) for answer in plain] == [14, 1, 18]
    answers = tokens(plain)
    for right in (0, 3, 6):
        oracle = Oracle(answers, 6, VOCABULARY, lambda *_, right=right: right)
        results = decode_with(Engine(target, draft), greedy(prompts, 18), oracle)
        assert tokens(results) == answers
        assert all(result.finish_reason == "length" for result in results)
    assert max(furthest) == 23


# --- rows, requests and chunks do not see each other ------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_gives_the_same_alone_and_in_a_batch(target: Target, draft: Draft, temperature: float) -> None:
    prompts, seeds = random_prompts(), [5, 6, 7, 8, 9]
    settings: dict[str, Any] = {"max_new_tokens": 25, "temperature": temperature}
    together = generate(target, draft, prompts, seed=seeds, **settings)
    alone = [generate(target, draft, [p], seed=[s], **settings)[0] for p, s in zip(prompts, seeds, strict=True)]
    backwards = generate(target, draft, prompts[::-1], seed=seeds[::-1], **settings)
    assert together == alone == backwards[::-1]


def test_a_second_request_sees_nothing_of_the_first(target: Target, draft: Draft) -> None:
    engine = Engine(target, draft)
    first, second = greedy(random_prompts((30, 12)), 40), greedy(random_prompts((4, 2, 9), seed=1), 20)
    engine.decode(first)
    used = engine.decode(second)
    assert used == Engine(target, draft).decode(second)
    assert engine.decode(first) == engine.decode(first)


@pytest.mark.parametrize("chunk", [1, 3, 8, 512])
def test_chunked_prefill_feeds_the_whole_prompt_to_target_and_draft(target: Target, draft: Draft, chunk: int) -> None:
    prompts = random_prompts()
    engine = Engine(target, draft, EngineOptions(prefill_chunk=chunk))
    answers = engine.submit(greedy(prompts, 2))
    while not all(answer.token_ids for answer in answers):
        engine.step()
    pool = engine.runner.pool
    assert pool is not None
    for row, prompt in enumerate(prompts):
        slot = [len(p) for p in sorted(prompts, key=len, reverse=True)].index(len(prompt))
        ids, positions = torch.tensor([prompt]), torch.arange(len(prompt))[None]
        states = target.forward(ids, positions, tap_ids=draft.config.target_layer_ids)
        assert states.taps is not None
        with torch.no_grad():
            expected = draft.context_keys_values(states.taps, positions)
        for stored, wanted in zip(pool.draft.joint, expected, strict=True):
            for part in range(2):  # keys, values
                found = stored[part, slot, :, : len(prompt)]
                torch.testing.assert_close(found, wanted[part][0], atol=1e-4, rtol=1e-4)
        assert states.final_state is not None
        assert answers[row].token_ids[0] == target.ends.project(states.final_state)[0, -1].argmax()


@pytest.mark.parametrize("bucket", [1, 7, 1000])
def test_the_context_bucket_changes_nothing(target: Target, draft: Draft, bucket: int) -> None:
    prompts = random_prompts()
    expected = generate(target, draft, prompts, max_new_tokens=30)
    found = generate(target, draft, prompts, max_new_tokens=30, options=EngineOptions(context_bucket=bucket))
    assert found == expected


# --- the draft sees in decoding what it saw in training ---------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3, "causal": False},
        {"causal": True},
    ],
)
def test_states_of_a_block_equal_the_training_forward_at_the_same_anchor(
    target: Target, options: dict[str, Any]
) -> None:
    draft = tiny_draft(target, num_layers=2, block_size=5, **options)
    prompts = random_prompts()
    seen: list[tuple[list[int], Tensor]] = []  # anchors of the rows, hidden states; both by prompt

    class Recorder:
        num_proposals = 4

        def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Any) -> Any:
            assert engine.runner.pool is not None
            slots = [slots_of[prompt] for prompt in range(len(prompts))]
            seen.append(((engine.runner.pool.state.length - 1)[slots].tolist(), hidden[slots]))
            return method.fill(hidden, anchor_ids, sampler)

    engine = Engine(target, draft)
    method = engine.drafter.filler
    assert method is not None
    engine.drafter.filler = Recorder()
    slots_of = {prompt: slot for slot, prompt in enumerate(sorted(range(5), key=lambda i: -len(prompts[i])))}
    results = engine.decode(greedy(prompts, 12))
    layout = algorithm_for(draft.config).block_layout(draft.config)
    for row, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        ids = torch.tensor([prompt + result.token_ids])
        length = ids.shape[1]
        positions, document = torch.arange(length)[None], torch.zeros(1, length, dtype=torch.int64)
        anchors = torch.tensor([[step[0][row] for step in seen if step[0][row] < length - 1]])
        ones = torch.ones_like(anchors)
        blocks = build_blocks(
            ids, positions >= 0, positions, document, Anchors(anchors, ones.bool(), ones), layout, VOCABULARY - 1
        )
        taps = target.forward(ids, positions, tap_ids=draft.config.target_layer_ids, final_state=False).taps
        assert taps is not None
        with torch.no_grad():
            trained = draft(
                target.ends.embedding_rows(blocks.input_ids),
                blocks.positions,
                draft.context_keys_values(taps, positions),
                dense_attention(blocks, document, draft.attention_kinds),
            )[0]
        decoded = torch.stack([step[1][row] for step in seen if step[0][row] < length - 1])
        assert len(decoded) >= 3
        torch.testing.assert_close(decoded, trained, atol=2e-4, rtol=1e-3)


# --- a step is a function of tensors ----------------------------------------------------------------------------------


class NoHost(TorchDispatchMode):
    """Refuses what makes the host wait for the device, or makes shapes depend on values."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal.", "unique", "item")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.calls = 0
        monkeypatch.setattr(torch.Tensor, "tolist", self.refuse)  # copies without an operation that could be seen
        monkeypatch.setattr(torch.Tensor, "numpy", self.refuse)

    @staticmethod
    def refuse(*_: Any) -> None:
        raise AssertionError("copied to the host")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        name = str(function).removeprefix("aten.")
        assert not name.startswith(self.WAITING), name
        if name.startswith(("index.", "index_put")):
            assert all(index is None or index.dtype is not torch.bool for index in args[1]), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafted", [True, False])
def test_a_step_never_waits_for_the_device(target: Target, draft: Draft, drafted: bool, temperature: float) -> None:
    engine = Engine(target, draft if drafted else None)
    sampling = SamplingOptions(temperature, 0.9, 20) if temperature else SamplingOptions()
    answers = engine.submit(Request.of(random_prompts(), max_new_tokens=20, sampling=sampling, seed=1))
    engine.step()
    assert engine.runner.pool is not None
    slots, bounds = engine.runner.pool.rows(0, 5), SamplingBounds.of(answer.sampling for answer in answers)
    with pytest.MonkeyPatch.context() as patch, NoHost(patch) as watch:
        engine.runner.stepper.step(slots, engine.scheduler.shape.reserved, bounds)
        engine.runner.stepper.step(slots, engine.scheduler.shape.reserved, bounds)
        assert watch.calls > 100
        with pytest.raises(AssertionError):
            engine.step()  # it reads what happened


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
    ],
)
def test_the_watch_sees_what_waits(waits: Any) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        NoHost(patch),
        pytest.raises(AssertionError),
    ):
        waits(torch.ones(3))


def test_weights_keep_no_gradient(target: Target, draft: Draft) -> None:
    draft.zero_grad()
    engine = Engine(target, draft)
    engine.decode(greedy(random_prompts(), 3))
    assert engine.runner.pool is not None
    assert not engine.runner.pool.draft.joint.requires_grad
