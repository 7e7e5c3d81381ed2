"""Intervals against plain computations, and how often they hold the truth."""

import math

import numpy as np
import pytest
from scipy.stats import t as scipy_t

from draftsmith.bench.intervals import LOG_SCALE, between, jackknife, ratio, student_t


def test_jackknife_equals_leaving_out_each_unit_in_turn():
    draw = np.random.default_rng(1)
    units = [(float(draw.integers(5, 60)), float(draw.integers(3, 20))) for _ in range(7)]
    found = jackknife(units, ratio)
    without = [
        sum(a for j, (a, _) in enumerate(units) if j != i) / sum(b for j, (_, b) in enumerate(units) if j != i)
        for i in range(7)
    ]
    mean = sum(without) / 7
    error = math.sqrt(6 / 7 * sum((value - mean) ** 2 for value in without))
    assert found.value == pytest.approx(sum(a for a, _ in units) / sum(b for _, b in units))
    assert (found.high - found.low) / 2 == pytest.approx(scipy_t.ppf(0.975, 6) * error, rel=1e-4)
    moved = jackknife([(a + 9 * (i == 3), b) for i, (a, b) in enumerate(units)], ratio)
    assert moved.high != found.high


@pytest.mark.parametrize("prompts", [5, 40])
def test_intervals_hold_the_truth_about_as_often_as_they_say(prompts):
    draw = np.random.default_rng(prompts)
    held = 0
    for _ in range(600):
        # Prompts differ in how predictable they are, and verifies of one prompt resemble each other.
        verifies = draw.integers(10, 40, prompts)
        mean = draw.gamma(9.0, 1 / 3.0, prompts)
        tokens = draw.poisson(mean * verifies)
        found = jackknife(np.stack([tokens, verifies], 1), ratio)
        held += found.low <= 3.0 <= found.high
    assert 0.92 <= held / 600 <= 0.98


def test_too_little_to_say_anything():
    assert jackknife([], ratio) is None
    assert jackknife([(3.0, 0.0), (2.0, 0.0)], ratio) is None
    for few in ([(6.0, 2.0)], [(3.0, 1.0), (3.0, 1.0)]):
        one = jackknife(few, ratio)
        assert (one.value, one.low, one.high) == (3.0, None, None)
    # Without the first prompt there is no verify left to divide by: nothing can be said of the spread.
    assert jackknife([(6.0, 2.0), (0.0, 0.0), (0.0, 0.0)], ratio).low is None


def test_intervals_of_speeds_stay_above_zero():
    wild = [(100.0, 1.0), (100.0, 40.0), (100.0, 2.0)]
    assert jackknife(wild, ratio).low < 0
    found = jackknife(wild, ratio, LOG_SCALE)
    assert 0 < found.low < found.value < found.high
    assert found.value / found.low == pytest.approx(found.high / found.value)


@pytest.mark.parametrize(("prompts", "mean"), [(4, 1.5), (12, 3.6), (12, 7.7)])
def test_intervals_of_accept_lengths_stay_between_one_token_and_a_block(prompts, mean):
    draw = np.random.default_rng(prompts)
    held = below = 0
    for _ in range(400):
        verifies = draw.integers(10, 40, prompts)
        place = draw.beta(14 * (mean - 1) / 7, 14 * (8 - mean) / 7, prompts)  # of each prompt, between 1 and 8
        tokens = verifies + draw.binomial(7 * verifies, place)
        found = jackknife(np.stack([tokens, verifies], 1), ratio, between(1.0, 8.0))
        assert 1.0 < found.low < found.value < found.high < 8.0
        held += found.low <= mean <= found.high
        straight = jackknife(np.stack([tokens, verifies], 1), ratio)
        below += straight.low < 1.0 or straight.high > 8.0
    assert 0.87 <= held / 400 <= 0.99
    assert prompts > 4 or below > 0


def test_no_interval_where_nothing_ever_was_accepted():
    found = jackknife([(20.0, 20.0), (31.0, 31.0), (12.0, 12.0)], ratio, between(1.0, 8.0))
    assert (found.value, found.low, found.high) == (1.0, None, None)
    one = jackknife([(20.0, 20.0), (31.0, 31.0), (14.0, 12.0)], ratio, between(1.0, 8.0))
    assert one.value > 1.0
    assert one.low is None  # without the third prompt none was


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 8, 30, 500])
def test_quantiles_of_student(freedom):
    assert student_t(0.975, freedom) == pytest.approx(scipy_t.ppf(0.975, freedom), rel=2e-3)
