"""The figures against counts made by hand."""

import random

import pytest

from draftsmith.bench.figures import equal_at_width, equal_prompts, equal_share, figures, histogram, slot_acceptance
from draftsmith.bench.headline import percent
from draftsmith.bench.records import PLAIN, equal_tokens
from tests.bench.made import answer, report, timed


def of(made):
    return figures(made, made.drafts[0], 1)


def test_accept_length_is_the_mean_over_verifies_not_over_prompts():
    made = report([answer("a", [1, 1, 1, 1], category="lists"), answer("b", [6], category="code"), answer("c", [])])
    found = of(made)
    assert found.accept_length.value == pytest.approx(10 / 5)
    assert {name: length.value for name, length in found.accept_length_by_category.items()} == {
        "lists": 1.0,
        "code": 6.0,
    }
    assert found.histogram == [4, 0, 0, 0, 0, 1]
    assert found.accept_length.low is None  # without "b" nothing was ever accepted
    more = of(report([answer("a", [1, 2, 1, 1]), answer("b", [6]), answer("c", []), answer("d", [3, 1])])).accept_length
    assert 1 < more.low < more.value < more.high < 1 + made.drafts[0].proposals
    assert more.value == pytest.approx(15 / 7)


def test_the_verify_that_met_the_limit_does_not_count():
    assert of(report([answer("a", [4, 4, 1], finish_reason="length")])).accept_length.value == 4.0
    assert of(report([answer("a", [4, 4, 1], finish_reason="stop")])).accept_length.value == 3.0
    assert of(report([answer("a", [4], finish_reason="length")])).accept_length is None


def test_histogram_equals_a_plain_count():
    draw = random.Random(3)
    lengths = [draw.randint(1, 7) for _ in range(500)]
    assert histogram(lengths) == [lengths.count(n) for n in range(1, max(lengths) + 1)]
    assert histogram([]) == []


def test_acceptance_by_slot():
    # Committed 3: slots 1 and 2 accepted, 3 refused. 1: slot 1 refused. 4: all three accepted. The last verify: slot 1
    # accepted, and nobody knows of slot 2.
    slots = slot_acceptance([answer("a", [3, 1, 4, 2])], proposals=3)
    assert slots.conditional == [3 / 4, 2 / 2, 1 / 2]
    assert slots.joint == pytest.approx([3 / 4, 3 / 4, 3 / 8])
    assert slot_acceptance([answer("a", [1, 1])], 3).conditional == [0.0, None, None]
    assert slot_acceptance([answer("a", [1, 1])], 3).joint == [0.0, None, None]


def test_speed_and_speedup():
    rounds = [timed("a", 11, 1.1), timed("a", 11, 2.1, PLAIN), timed("b", 31, 2.1, index=1)]
    rounds.append(timed("b", 31, 6.1, PLAIN, index=1))
    found = of(report([answer("a", [2]), answer("b", [2])], rounds))
    assert found.tokens_per_second.value == pytest.approx(42 / 3.2)
    assert found.decode_tokens_per_second.value == pytest.approx(40 / 3.0)
    assert found.decode_speedup.value == pytest.approx((40 / 3.0) / (40 / 8.0))
    assert found.speedup.value == pytest.approx((42 / 3.2) / (42 / 8.2))
    assert found.first_token_seconds == pytest.approx(0.1)
    assert found.cycle_seconds == pytest.approx(3.0 / 20)


def test_equality_counts_places_and_ends():
    assert equal_tokens([1, 2, 3, 4], [1, 2, 9, 4]) == 3
    assert equal_share([answer("a", [3, 3]), answer("b", [2])]) == 1.0
    one_wrong = [answer("a", [3, 3], equal_tokens=6), answer("b", [2])]
    assert equal_share(one_wrong) == pytest.approx(9 / 10)
    assert equal_prompts(one_wrong) == 0.5
    # Two tokens fewer than plain decoding gave are two differences, though all that are there agree.
    assert equal_share([answer("a", [3, 3], equal_tokens=7, plain_tokens=9)]) == pytest.approx(7 / 9)
    assert equal_prompts([answer("a", [3, 3], equal_tokens=7, plain_tokens=9)]) == 0.0
    assert equal_share([answer("a", [3], equal_tokens=None, plain_tokens=None)]) is None


def test_answers_that_differ_by_rounding_between_shapes_are_told_from_those_that_are_wrong():
    same, rounded = answer("a", [3, 3]), answer("b", [2], equal_tokens=1, equal_at_width=True)
    assert equal_at_width([same, rounded]) == 1.0
    assert equal_at_width([same, rounded, answer("c", [2], equal_tokens=1, equal_at_width=False)]) == pytest.approx(
        2 / 3
    )
    assert equal_at_width([answer("a", [3], equal_tokens=None, plain_tokens=None)]) is None


def test_no_decoding_speed_where_first_tokens_took_longer_than_whole_answers():
    answers = [answer(name, [3, 3]) for name in "abc"]
    rounds = [timed(a.prompt, 7, s, d, index=i) for i, a in enumerate(answers) for d, s in (("d", 1.0), (PLAIN, 2.0))]
    assert of(report(answers, rounds)).decode_tokens_per_second.value == pytest.approx(18 / 2.7)
    rounds[2] = rounds[2].model_copy(update={"first_token_seconds": 1.1})
    disturbed = of(report(answers, rounds))
    assert (disturbed.decode_tokens_per_second, disturbed.decode_speedup, disturbed.cycle_seconds) == (None, None, None)
    assert disturbed.speedup.value == pytest.approx(2.0)


def test_a_share_below_one_is_never_shown_as_whole():
    assert percent(1.0) == "100 %"
    assert percent(0.999999) == "99.99 %"
    assert percent(0.5) == "50.00 %"
    assert percent(None) == "-"
