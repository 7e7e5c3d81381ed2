"""Two benchmarks held against each other, prompt by prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.bench.figures import accept_sums, decode_sums, speed_ratio
from draftsmith.bench.headline import plural
from draftsmith.bench.intervals import LOG_SCALE, PLAIN_SCALE, Estimate, jackknife
from draftsmith.bench.records import PLAIN, BenchReport, Decoder, Round
from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class Comparison:
    """One figure of two drafts at one batch size. first, second: the figure itself; change: second minus first, or
    second over first (`neutral` is what no change would be: 0 or 1); units: how many prompts or rounds were paired."""

    figure: str
    batch_size: int
    first: float
    second: float
    change: Estimate
    neutral: float
    units: int

    @property
    def verdict(self) -> str:
        """What may be said of the change; `noise`: its interval holds no change."""
        low, high = self.change.low, self.change.high
        if low is None or high is None:
            return "too few pairs"
        if low <= self.neutral <= high:
            return "noise"
        return "higher" if self.change.value > self.neutral else "lower"


@dataclass(frozen=True)
class Comparisons:
    """All comparable figures of two drafts, and what a reader has to know about the pairing."""

    first: str
    second: str
    rows: list[Comparison]
    notes: list[str]


def compare(
    first: BenchReport, second: BenchReport, first_draft: str | None = None, second_draft: str | None = None
) -> Comparisons:
    """The second benchmark's draft against the first one's, at every batch size that both have.

    Accept lengths are paired by prompt, speeds by round (the same prompts decoded together). Where a benchmark has
    several drafts, the names choose. Raises `DraftsmithError` for an unknown or missing name, and where the two have no
    prompt or no batch size in common.
    """
    one, other = _draft(first, first_draft, "first"), _draft(second, second_draft, "second")
    sizes = [size for size in first.batch_sizes if size in second.batch_sizes]
    if not sizes:
        raise DraftsmithError(
            f"the first benchmark has batch sizes {first.batch_sizes}, the second {second.batch_sizes}; measure one in "
            "common"
        )
    rows: list[Comparison] = []
    notes = _setting_notes(first, second)
    same = _same_prompts(first, second, notes)
    for size in sizes:
        rows += _accept_lengths(first, second, one, other, size, same)
        rows += _speeds(first, second, one, other, size, same, notes)
    return Comparisons(one.name, other.name, rows, list(dict.fromkeys(notes)))


def _draft(report: BenchReport, name: str | None, which: str) -> Decoder:
    names = [draft.name for draft in report.drafts]
    if name is None and len(names) == 1:
        return report.drafts[0]
    if name not in names:
        said = "measures several drafts" if name is None else f"has no draft {name!r}"
        raise DraftsmithError(f"the {which} benchmark {said}; name one of {', '.join(names)} (--{which})")
    return report.drafts[names.index(name)]


def _setting_notes(first: BenchReport, second: BenchReport) -> list[str]:
    told = ("target", "dtype", "device", "torch", "max_new_tokens", "temperature", "top_p", "top_k", "seed")
    return [
        f"{name} differs: {first.setting.get(name)} and {second.setting.get(name)}"
        for name in told
        if first.setting.get(name) != second.setting.get(name)
    ]


def _same_prompts(first: BenchReport, second: BenchReport, notes: list[str]) -> set[str]:
    """The ids under which both have the same questions. Ids alone do not tell: files that name none number their
    lines."""
    left, right = ({prompt.id: prompt for prompt in report.prompts} for report in (first, second))
    common = left.keys() & right.keys()
    same = {n for n in common if (left[n].turns, left[n].system) == (right[n].turns, right[n].system)}
    others, alone = len(common) - len(same), len(left.keys() ^ right.keys())
    if not same:
        said = f" ({others} ids are in both, with other questions)" if others else ""
        raise DraftsmithError(f"the two benchmarks have no prompt in common{said}; measure both on the same prompts")
    if alone:
        notes.append(f"{plural(alone, 'prompt is', 'prompts are')} in one of the two only; left out")
    if others:
        notes.append(f"{plural(others, 'id has', 'ids have')} other questions in the two; left out")
    return same


def _accept_lengths(
    first: BenchReport, second: BenchReport, one: Decoder, other: Decoder, size: int, same: set[str]
) -> list[Comparison]:
    left = accept_sums(first.answers_of(one.name, size))
    right = accept_sums(second.answers_of(other.name, size))
    units = [(*left[prompt], *right[prompt]) for prompt in left if prompt in same]

    def difference(sums: np.ndarray) -> np.ndarray:
        return sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1]

    return _row("accept length", size, units, difference, lambda s: (s[0] / s[1], s[2] / s[3]), 0.0)


def _speeds(
    first: BenchReport,
    second: BenchReport,
    one: Decoder,
    other: Decoder,
    size: int,
    same: set[str],
    notes: list[str],
) -> list[Comparison]:
    left, right = _by_prompts(first, one.name, size), _by_prompts(second, other.name, size)
    bare_left, bare_right = _by_prompts(first, PLAIN, size), _by_prompts(second, PLAIN, size)
    both_have = left.keys() & right.keys() & bare_left.keys() & bare_right.keys()
    common = [key for key in left if key in both_have and same.issuperset(key[2:])]
    if not common:
        notes.append(f"batch size {size}: no round holds the same prompts in both, so speeds are not compared")
        return []
    if any(of[key][1] <= 0 for of in (left, right, bare_left, bare_right) for key in common):
        notes.append(
            f"batch size {size}: a round took no longer than its first tokens alone, so what decoding took is not known"
        )
        return []
    fast = [(*right[key], *left[key]) for key in common]
    plain = [(*bare_right[key], *bare_left[key]) for key in common]
    both = [(*right[key], *bare_right[key], *left[key], *bare_left[key]) for key in common]

    def speedups(sums: np.ndarray) -> np.ndarray:
        return speed_ratio(sums[:, :4]) / speed_ratio(sums[:, 4:])

    def speeds(s: Sequence[float]) -> tuple[float, float]:
        return s[2] / s[3], s[0] / s[1]

    def gains(s: Sequence[float]) -> tuple[float, float]:
        return s[4] / s[5] / (s[6] / s[7]), s[0] / s[1] / (s[2] / s[3])

    return [
        *_row("decode tokens/s", size, fast, speed_ratio, speeds, 1.0),
        *_row("plain decode tokens/s", size, plain, speed_ratio, speeds, 1.0),
        *_row("decode speed-up over plain", size, both, speedups, gains, 1.0),
    ]


def _by_prompts(report: BenchReport, decoder: str, size: int) -> dict[tuple[object, ...], tuple[float, float]]:
    def key(round_: Round) -> tuple[object, ...]:
        return (round_.seed, round_.turn, *round_.prompts)

    return {key(r): decode_sums(r) for r in report.rounds_of(decoder, size) if r.tokens > len(r.prompts)}


def _row(
    figure: str,
    size: int,
    units: Sequence[Sequence[float]],
    change: Callable[[np.ndarray], np.ndarray],
    each: Callable[[Sequence[float]], tuple[float, float]],
    neutral: float,
) -> list[Comparison]:
    found = jackknife(units, change, LOG_SCALE if neutral == 1.0 else PLAIN_SCALE)
    if found is None:
        return []
    sums = np.asarray(units, dtype=np.float64).sum(0)
    first, second = each([float(value) for value in sums])
    return [Comparison(figure, size, first, second, found, neutral, len(units))]
