"""Intervals against plain computations, and how often they hold the truth."""

import math

import numpy as np
import pytest
from scipy.stats import t as scipy_t

from draftsmith.bench.intervals import jackknife, ratio, student_t


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
    found = jackknife(wild, ratio, log=True)
    assert 0 < found.low < found.value < found.high
    assert found.value / found.low == pytest.approx(found.high / found.value)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 8, 30, 500])
def test_quantiles_of_student(freedom):
    assert student_t(0.975, freedom) == pytest.approx(scipy_t.ppf(0.975, freedom), rel=2e-3)
