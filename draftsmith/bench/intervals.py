"""Confidence intervals of figures that are functions of sums over prompts.

Verifies of one prompt resemble each other, so the units are prompts, not verifies. Accept length, tokens per second and
speed-up are ratios of sums, whose spread the jackknife gives without another assumption: the figure is computed anew
without each prompt in turn. The interval is the figure +- t times the jackknife's standard error, with Student's t of
n - 1 degrees of freedom; unlike percentiles of a bootstrap it is not too narrow for the few prompts of a short run, and
it draws no random numbers.

A figure that cannot take every value is looked at on a scale without ends (`Scale`), so that its interval ends where
the figure must: speeds and their ratios by their logarithm, an accept length, which lies between one token and a whole
block, by the log odds of its place between the two.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from pydantic import BaseModel, ConfigDict

CONFIDENCE = 0.95

FEWEST = 3
"""Units that an interval needs: of two, the spread is hardly known, and the interval would span everything."""


class Estimate(BaseModel):
    """A figure and its 95 % interval; `low` and `high` are None where too few units were measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Scale:
    """On which an interval is made: `there` maps figures to it, `back` an end of the interval to a figure."""

    there: Callable[[np.ndarray], np.ndarray]
    back: Callable[[float], float]


PLAIN_SCALE = Scale(lambda figures: figures, float)
LOG_SCALE = Scale(np.log, math.exp)
"""For figures above 0."""


def between(low: float, high: float) -> Scale:
    """For figures from `low` to `high`: the log odds of their place in between."""

    def back(odds: float) -> float:
        return low + (high - low) * float(0.5 * (1.0 + np.tanh(odds / 2)))

    return Scale(lambda figures: np.log((figures - low) / (high - figures)), back)


def jackknife(
    units: Sequence[Sequence[float]], figure: Callable[[np.ndarray], np.ndarray], scale: Scale = PLAIN_SCALE
) -> Estimate | None:
    """The estimate of `figure` over units (prompts, rounds), each a row of numbers that are added up.

    figure: sums [n, c] -> values [n]; it is given the sums of all units, and those without each unit. A unit without
    which the figure has no value (nothing is left to divide by) is left out of the interval; fewer than `FEWEST` units
    give none, and neither does a figure that lies at an end of the scale, with every unit or without one of them: what
    never varied says nothing of how much it may. None where the figure itself has no value.
    """
    rows = np.asarray(units, dtype=np.float64)
    if rows.size == 0:
        return None
    total = rows.sum(0, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(total)[0])
        without = figure(total - rows)
        spread = scale.there(without[np.isfinite(without)])
        middle = float(scale.there(np.array(value)))
    if not math.isfinite(value):
        return None
    n = len(spread)
    if n < FEWEST or not math.isfinite(middle) or not np.isfinite(spread).all():
        return Estimate(value=value)
    error = math.sqrt((n - 1) / n * float(((spread - spread.mean()) ** 2).sum()))
    margin = student_t(0.5 + CONFIDENCE / 2, n - 1) * error
    return Estimate(value=value, low=scale.back(middle - margin), high=scale.back(middle + margin))


def ratio(sums: np.ndarray) -> np.ndarray:
    """Sums [n, 2] -> first over second."""
    return sums[:, 0] / sums[:, 1]


def student_t(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution, for probabilities from 0.5 on.

    Exact for one and two degrees of freedom; above, Fisher and Cornish's expansion around the normal quantile, whose
    error at 0.975 is 0.12 % for three degrees and falls fast.
    """
    p, n = probability, freedom
    if n == 1:
        return math.tan(math.pi * (p - 0.5))
    if n == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / n**power for power, term in enumerate(terms))
