"""Who gets which slot and what passes compute, without any model: a device is a loop that commits tokens."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.decoding.answer import Answer, Delta
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingBounds, SamplingOptions
from draftsmith.decoding.scheduler import OVERTAKING, PoolShape, Scheduler
from draftsmith.kernels.state.report import FINISHED, INVALID_DRAFT

WINDOW, WIDTH, REACH = 400, 4, 6


def row(prompt: int, new: int = 5, stops: int = 0, sampling: SamplingOptions | None = None) -> Answer:
    request = Request.of(
        [[1] * prompt],
        max_new_tokens=new,
        sampling=sampling or SamplingOptions(),
        stop_token_ids=list(range(stops)),
        seed=0,
    )
    return Answer(request, 0, WINDOW)


def scheduler(*, on_gpu: bool = False, graphs: bool = False, **options: Any) -> Scheduler:
    made = EngineOptions.model_validate(options)
    return Scheduler(made, width=WIDTH, reach=REACH, window=WINDOW, on_gpu=on_gpu, graphs=graphs)


class Device:
    """What an engine does with a scheduler, on a device that commits random numbers of tokens.

    `length` and `read` are what the device knows of each slot; every launch is checked against them.
    """

    def __init__(self, plans: Scheduler, seed: int, lag: int, stops: float = 0.05) -> None:
        self.plans, self.lag, self.random = plans, lag, random.Random(seed)
        self.stops = stops  # the chance of a stop token
        self.reports: list[tuple[list[list[int]], tuple[Answer | None, ...], bool]] = []
        self.made = 0
        self.placed: list[Answer] = []
        self.row: list[Answer | None] = []
        self.read: list[int] = []
        self.length: list[int] = []
        self.ended: list[bool] = []

    def step(self) -> list[Delta]:
        shape = self.plans.shape_wanted()
        if shape is not None:
            assert not any(row for row in self.row)
            self.take(0)
            self.plans.move_in(shape)
            self.made += 1
            self.row, self.ended = [None] * shape.slots, [True] * shape.slots
            self.read, self.length = [0] * shape.slots, [1] * shape.slots
        for placement in self.plans.admit():
            for slot, answer in enumerate(placement.answers, placement.first):
                assert self.row[slot] is None
                assert self.plans.shape is not None
                assert self.plans.shape.fits(answer)
                self.row[slot], self.ended[slot] = answer, True
                self.read[slot], self.length[slot] = 0, len(answer.prompt)
                self.placed.append(answer)
        for prompts in self.plans.passes():
            self.prefill(prompts)
        plan = self.plans.next_step()
        if plan is not None:
            self.launch(plan)
        return self.take(0 if plan is None else self.lag)

    def prefill(self, plan: Any) -> None:
        shape = self.plans.shape
        assert shape is not None
        for slot in range(plan.first, plan.end):
            answer = self.row[slot]
            assert answer is not None
            assert self.read[slot] < len(answer.prompt)
            self.read[slot] += plan.width
            assert self.read[slot] <= min(plan.extent, shape.max_length + WIDTH, WINDOW)
        lines = []
        for place, answer in enumerate(plan.rows):
            slot = plan.first + place
            over = self.read[slot] >= len(self.row[slot].prompt)  # type: ignore[union-attr]
            assert (answer is not None) == (over and slot not in plan.leaving)
            if answer is not None:
                self.ended[slot] = False
            lines.append(self.commit(slot, 1))
        if plan.bounds is not None:
            self.reports.append((lines, plan.rows, False))
        self.free(plan.leaving)

    def launch(self, plan: Any) -> None:
        shape = self.plans.shape
        assert shape is not None
        for slot, answer in enumerate(self.row):
            if answer is not None and not self.ended[slot]:
                assert slot < plan.size, "a row in work is computed"
                assert self.length[slot] - 1 + REACH <= plan.extent <= shape.reserved
        lines = [self.commit(slot, self.random.randint(1, WIDTH)) for slot in range(plan.size)]
        self.reports.append((lines, plan.rows, True))

    def commit(self, slot: int, count: int) -> list[int]:
        answer = self.row[slot]
        if answer is None or self.ended[slot]:
            return [self.length[slot], 0, FINISHED, 0, 0, 0, 0]
        count = min(count, answer.limit - self.length[slot])
        self.length[slot] += count
        self.ended[slot] = self.length[slot] >= answer.limit or self.random.random() < self.stops
        return [self.length[slot], count, FINISHED * self.ended[slot], 7, 7, 7, 7]

    def take(self, leave: int) -> list[Delta]:
        deltas: list[Delta] = []
        while len(self.reports) > leave:
            lines, rows, verified = self.reports.pop(0)
            deltas += self.plans.take(lines, rows, verified=verified)
        slots = self.plans.leave(deltas)
        assert len(slots) == len(set(slots)) == sum(delta.last for delta in deltas)
        self.free(slots)
        return deltas

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.row[slot], self.ended[slot], self.length[slot] = None, True, 1
            assert self.plans.occupants[slot] is None


ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60), st.integers(0, 12)), min_size=1, max_size=25)
OPTIONS = st.fixed_dictionaries(
    {
        "slots": st.none() | st.integers(1, 5),
        "batch_buckets": st.none() | st.just((1, 2)),
        "prefill_chunk": st.sampled_from([1, 7, 64, 512]),
        "prefill_rows": st.none() | st.just(1),
        "context_bucket": st.sampled_from([8, 256]),
    }
)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, options=OPTIONS, on_gpu=st.booleans(), lag=st.integers(0, 3), seed=st.integers(0, 99))
def test_every_row_gets_a_slot_and_ends(
    rows: list[tuple[int, int, int]], options: dict[str, Any], on_gpu: bool, lag: int, seed: int
) -> None:
    """Rows that come in as others go on, some of them cancelled; what a pass may touch is checked by `Device`."""
    plans = scheduler(on_gpu=on_gpu, graphs=on_gpu, **options)
    device, answers = Device(plans, seed, lag), [row(*one) for one in rows]
    chance = random.Random(seed)
    waiting, told = list(answers), dict.fromkeys(answers, 0)
    for _ in range(20_000):
        if waiting and chance.random() < 0.5:
            plans.add([waiting.pop(0)])
        if chance.random() < 0.05:
            running = [a for a in answers if not a.finished and a not in waiting]
            if running:
                one = chance.choice(running)
                one.finish_reason = "cancelled"
                slot = plans.withdraw(one)
                device.free([] if slot is None else [slot])
        for delta in device.step():
            assert delta.answer.finish_reason != "cancelled"
            told[delta.answer] += len(delta.token_ids)
        if not waiting and plans.idle:
            break
    assert plans.idle
    assert all(answer.finished for answer in answers)
    for answer in answers:
        assert told[answer] == len(answer.token_ids) <= answer.limit - len(answer.prompt)
        if answer.finish_reason == "length":
            assert sum(answer.accept_lengths) == len(answer.token_ids) - 1


def test_slots_are_as_many_as_wait_and_as_long_as_the_longest() -> None:
    plans = scheduler()
    plans.add([row(10, 5), row(30, 7)])
    assert plans.shape_wanted() == PoolShape(slots=2, max_length=37, stops=8, reserved=37 + REACH)
    rounded = scheduler(graphs=True, context_bucket=16, slots=3)
    rounded.add([row(10, 5, stops=11)])
    assert rounded.shape_wanted() == PoolShape(slots=3, max_length=16, stops=11, reserved=16 + REACH)
    fixed = scheduler(max_length=900)
    fixed.add([row(10, 5)])
    assert fixed.shape_wanted() == PoolShape(slots=1, max_length=WINDOW, stops=8, reserved=WINDOW + REACH)


def test_what_was_reserved_stays_until_a_row_does_not_fit() -> None:
    plans = scheduler()
    shape = plans.reserve(4, 50)
    assert shape == PoolShape(slots=4, max_length=50, stops=8, reserved=50 + REACH)
    plans.move_in(shape)
    plans.add([row(10, 5)])
    assert plans.shape_wanted() is None
    plans.add([row(60, 5)])
    assert plans.shape_wanted() == PoolShape(slots=4, max_length=65, stops=8, reserved=65 + REACH)


def test_shapes_of_steps_to_prepare() -> None:
    plans = scheduler(graphs=True, context_bucket=4, batch_buckets=(1, 8))
    plans.move_in(plans.reserve(4, 50))
    assert plans.step_shapes() == [(size, extent) for size in (1, 4) for extent in (8, 16, 32, 56)]


def test_rows_that_fit_overtake_for_a_while_and_then_wait_for_the_oldest() -> None:
    plans = scheduler(slots=2)
    device = Device(plans, seed=0, lag=0, stops=0.0)
    long, big, small = row(5, 350), row(370, 20), [row(5, 2) for _ in range(OVERTAKING + 20)]
    plans.add([long, *small[:2]])
    device.step()
    plans.add([big, *small[2:]])
    while not big.finished:
        device.step()
        if big in device.placed:
            assert long.finished
    first = device.placed.index(big)
    assert device.placed[1:3] == small[:2]  # these were before it
    assert first == 1 + 2 + OVERTAKING
    assert device.made == 2
    while not plans.idle:
        device.step()
    assert [answer for answer in device.placed[first:] if answer is not big] == small[2 + OVERTAKING :]


def test_nobody_waits_for_slots_that_are_empty() -> None:
    plans = scheduler(slots=1)
    device = Device(plans, seed=0, lag=0)
    small, big = [row(5, 2), row(5, 2)], row(200, 2)
    plans.add(small[:1])
    device.step()
    plans.add([big, small[1]])
    while not plans.idle:
        device.step()
    assert device.placed == [small[0], big, small[1]]
    assert device.made == 2


def test_a_step_holds_the_rows_in_work_and_no_more_than_its_bucket() -> None:
    plans = scheduler(slots=6, batch_buckets=(1, 2, 4), prefill_rows=1)
    device = Device(plans, seed=1, lag=0)
    plans.add([row(4, 90)])
    device.step()
    plan = plans.next_step()
    assert plan is not None
    assert (plan.size, plan.rows) == (1, (plans.occupants[0],))
    plans.add([row(4, 90), row(4, 90)])
    plans.admit()
    plan = plans.next_step()
    assert plan is not None
    assert plan.size == 4, "slots being read count, and lie before free ones"
    assert plan.rows[1:] == (None, None, None), "but no report is about them"


def test_bounds_follow_the_rows_in_work() -> None:
    plans = scheduler(slots=2)
    device = Device(plans, seed=3, lag=0)
    plans.add([row(3, 40)])
    device.step()
    plan = plans.next_step()
    assert plan is not None
    assert plan.bounds == SamplingBounds()
    plans.add([row(3, 40, sampling=SamplingOptions(0.5, top_k=9))])
    device.step()
    plan = plans.next_step()
    assert plan is not None
    assert plan.bounds == SamplingBounds(greedy=False, some_greedy=True, top_k=16)


def test_slots_of_rows_that_were_cut_short_are_unclean_for_the_next_row_alone() -> None:
    plans = scheduler(slots=3)
    plans.move_in(plans.reserve(3, 60))
    plans.add([row(3, 40), row(3, 40), row(3, 40)])
    plans.admit()
    list(plans.passes())
    broken, cancelled, _ = answers = list(plans.occupants)
    assert cancelled is not None
    assert broken is not None
    assert plans.next_step() is not None
    deltas = plans.take([[4, 1, INVALID_DRAFT, 7, 7, 7, 7]], [broken], verified=True)
    assert [(delta.answer, delta.fault) for delta in deltas] == [(broken, broken.fault)]
    assert plans.leave(deltas) == [0]
    cancelled.finish_reason = "cancelled"
    assert plans.withdraw(cancelled) == 1
    assert plans.occupants == [None, None, answers[2]]
    for unclean in ((0, 1), ()):
        plans.add([row(2, 40), row(2, 40)])
        (placement,) = plans.admit()
        assert placement.unclean == unclean
        for answer in placement.answers:
            plans.take([[3, 1, FINISHED, 7, 7, 7, 7]], [answer], verified=False)
        plans.leave([Delta(answer, (7,), "length", None) for answer in placement.answers])


@pytest.mark.parametrize("chunk", [2, 64])
def test_a_row_cancelled_while_it_is_read_leaves_when_its_prompt_is(chunk: int) -> None:
    plans = scheduler(slots=2, prefill_chunk=chunk)
    plans.add([row(6, 9), row(6, 9)])
    shape = plans.shape_wanted()
    assert shape is not None
    plans.move_in(shape)
    plans.admit()
    gone = plans.occupants[1]
    assert gone is not None
    gone.finish_reason = "cancelled"
    assert plans.withdraw(gone) is None
    passes = list(plans.passes())
    assert [one.leaving for one in passes] == [()] * (len(passes) - 1) + [(1,)]
    assert passes[-1].rows == (plans.occupants[0], None)
    assert plans.occupants[1] is None
    assert len(passes) == -(-6 // chunk)
