"""The figures of a benchmark, computed from its records here and nowhere else."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftsmith.bench.intervals import LOG_SCALE, Estimate, between, jackknife, ratio
from draftsmith.bench.records import PLAIN, BenchAnswer, BenchReport, Decoder, Round

UNCATEGORISED = "uncategorised"
"""The category of prompts that have none."""


@dataclass(frozen=True)
class Slots:
    """Acceptance by slot, 1 to P.

    conditional: of the verifies whose earlier proposals were all accepted, the share that accepts this one too; joint:
    the share that gets past this slot, the product of the conditional ones. None where no verify got there. Where an
    answer's end cuts its last verify, what came of the later slots is not known, and they are not counted.
    """

    conditional: list[float | None]
    joint: list[float | None]


@dataclass(frozen=True)
class Figures:
    """One decoder at one batch size; what plain decoding has no meaning for is None or empty. rows: the most that were
    decoded side by side, below the batch size where there were not as many prompts."""

    decoder: str
    batch_size: int
    rows: int
    prompts: int
    new_tokens: int
    tokens_per_second: Estimate | None
    decode_tokens_per_second: Estimate | None
    speedup: Estimate | None
    decode_speedup: Estimate | None
    first_token_seconds: float
    cycle_seconds: float | None
    accept_length: Estimate | None
    accept_length_by_category: dict[str, Estimate]
    histogram: list[int]
    slots: Slots
    equal_share: float | None
    equal_prompts: float | None
    equal_at_width: float | None
    memory_bytes: int | None

    @property
    def batch(self) -> str:
        """The batch size in words."""
        return f"batch size {self.batch_size}" + (f", {self.rows} rows" if self.rows < self.batch_size else "")

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return (
            asdict(self)
            | {
                name: None if value is None else value.model_dump()
                for name, value in vars(self).items()
                if isinstance(value, Estimate)
            }
            | {"accept_length_by_category": {k: v.model_dump() for k, v in self.accept_length_by_category.items()}}
        )


def all_figures(report: BenchReport) -> list[Figures]:
    """Of every decoder at every batch size, `plain` first."""
    return [figures(report, decoder, size) for size in report.batch_sizes for decoder in report.decoders]


def figures(report: BenchReport, decoder: Decoder, batch_size: int) -> Figures:
    """Of one decoder at one batch size, over all seeds."""
    answers = report.answers_of(decoder.name, batch_size)
    rounds = report.rounds_of(decoder.name, batch_size)
    plain = report.rounds_of(PLAIN, batch_size)
    drafted = decoder.name != PLAIN
    cycles = [(_decode_seconds(r), r.cycles) for r in rounds if r.cycles] if _decode(rounds) else []
    return Figures(
        decoder=decoder.name,
        batch_size=batch_size,
        rows=min(batch_size, max(len(r.prompts) for r in rounds)),
        prompts=len({answer.prompt for answer in answers}),
        new_tokens=sum(len(answer.token_ids) for answer in answers),
        tokens_per_second=jackknife(_whole(rounds), ratio, LOG_SCALE),
        decode_tokens_per_second=jackknife(_decode(rounds), ratio, LOG_SCALE),
        speedup=_speedup(_whole(rounds), _whole(plain)) if drafted else None,
        decode_speedup=_speedup(_decode(rounds), _decode(plain)) if drafted else None,
        first_token_seconds=sum(r.first_token_seconds for r in rounds) / len(rounds),
        cycle_seconds=sum(s for s, _ in cycles) / sum(n for _, n in cycles) if cycles else None,
        accept_length=accept_length(answers, decoder.proposals) if drafted else None,
        accept_length_by_category=by_category(answers, decoder.proposals) if drafted else {},
        histogram=histogram([length for answer in answers for length in answer.counted]) if drafted else [],
        slots=slot_acceptance(answers, decoder.proposals),
        equal_share=equal_share(answers) if drafted else None,
        equal_prompts=equal_prompts(answers) if drafted else None,
        equal_at_width=equal_at_width(answers) if drafted else None,
        memory_bytes=decoder.memory_bytes.get(batch_size),
    )


# --- accept length ----------------------------------------------------------------------------------------------------


def accept_sums(answers: Sequence[BenchAnswer]) -> dict[str, tuple[int, int]]:
    """Prompt -> (tokens committed by its counted verifies, their number), over turns and seeds."""
    sums: dict[str, tuple[int, int]] = {}
    for answer in answers:
        tokens, verifies = sums.get(answer.prompt, (0, 0))
        sums[answer.prompt] = (tokens + sum(answer.counted), verifies + len(answer.counted))
    return sums


def accept_length(answers: Sequence[BenchAnswer], proposals: int) -> Estimate | None:
    """Tokens committed per verify of `proposals` proposals, over all counted verifies; None when there is none."""
    return jackknife(list(accept_sums(answers).values()), ratio, between(1.0, 1.0 + proposals))


def by_category(answers: Sequence[BenchAnswer], proposals: int) -> dict[str, Estimate]:
    """Category -> accept length, in the order of first appearance; categories without a counted verify are left out."""
    kinds = list(dict.fromkeys(answer.category or UNCATEGORISED for answer in answers))
    found = {k: accept_length([a for a in answers if (a.category or UNCATEGORISED) == k], proposals) for k in kinds}
    return {kind: estimate for kind, estimate in found.items() if estimate is not None}


def histogram(accept_lengths: Sequence[int]) -> list[int]:
    """Counts by accept length: entry n-1 counts the verifies that committed n >= 1 tokens."""
    counts = [0] * max(accept_lengths, default=0)
    for length in accept_lengths:
        counts[length - 1] += 1
    return counts


def slot_acceptance(answers: Sequence[BenchAnswer], proposals: int) -> Slots:
    """`Slots` of verifies of `proposals` proposals each.

    A verify that commits n tokens has accepted n-1 proposals and, unless all were, refused the next one. Of the last
    verify of an answer, only the n-1 are sure: its end may have cut an accepted proposal as well as followed a refused
    one.
    """
    reached, accepted = [0] * proposals, [0] * proposals
    for answer in answers:
        for number, length in enumerate(answer.accept_lengths, start=1):
            sure = length - 1
            last = number == len(answer.accept_lengths)
            for slot in range(min(sure, proposals)):
                reached[slot] += 1
                accepted[slot] += 1
            if sure < proposals and not last:
                reached[sure] += 1
    conditional = [a / r if r else None for a, r in zip(accepted, reached, strict=True)]
    joint: list[float | None] = []
    for share in conditional:
        before = joint[-1] if joint else 1.0
        joint.append(None if share is None or before is None else before * share)
    return Slots(conditional, joint)


# --- speed ------------------------------------------------------------------------------------------------------------


def _decode_seconds(round_: Round) -> float:
    return round_.seconds - round_.first_token_seconds


def _whole(rounds: Sequence[Round]) -> list[tuple[float, float]]:
    """(tokens, seconds) of each round, the prompts' own passes included."""
    return [(r.tokens, r.seconds) for r in rounds]


def _decode(rounds: Sequence[Round]) -> list[tuple[float, float]]:
    """(tokens after the first of each row, seconds after the first tokens) of each round; rounds of single tokens are
    left out. Empty, so that no figure comes of it, where a round took no longer than its first tokens alone: the
    machine was disturbed, and what decoding took is not known."""
    longer = [decode_sums(r) for r in rounds if r.tokens > len(r.prompts)]
    return longer if all(seconds > 0 for _, seconds in longer) else []


def decode_sums(round_: Round) -> tuple[float, float]:
    """(tokens after the first of each row, seconds after the first tokens) of one round."""
    return round_.tokens - len(round_.prompts), _decode_seconds(round_)


def _speedup(fast: Sequence[tuple[float, float]], slow: Sequence[tuple[float, float]]) -> Estimate | None:
    """Tokens per second over tokens per second, paired by round."""
    if len(fast) != len(slow):
        return None
    return jackknife([(*a, *b) for a, b in zip(fast, slow, strict=True)], speed_ratio, LOG_SCALE)


def speed_ratio(sums: np.ndarray) -> np.ndarray:
    """Sums [n, 4] of (tokens, seconds, tokens, seconds) -> first over second tokens per second."""
    return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])


# --- equality ---------------------------------------------------------------------------------------------------------


def equal_share(answers: Sequence[BenchAnswer]) -> float | None:
    """Share of tokens that are plain decoding's at the same place; None when sampling.

    A missing or surplus token at the end counts as a difference.
    """
    compared = [a for a in answers if a.equal_tokens is not None and a.plain_tokens is not None]
    total = sum(max(len(a.token_ids), a.plain_tokens or 0) for a in compared)
    return sum(a.equal_tokens or 0 for a in compared) / total if total else None


def equal_prompts(answers: Sequence[BenchAnswer]) -> float | None:
    """Share of answers that are plain decoding's from end to end; None when sampling."""
    compared = [a for a in answers if a.equal_tokens is not None]
    whole = [a for a in compared if a.equal_tokens == len(a.token_ids) == a.plain_tokens]
    return len(whole) / len(compared) if compared else None


def equal_at_width(answers: Sequence[BenchAnswer]) -> float | None:
    """Share of answers that are plain decoding's from end to end, at its own width or at the verify's; None when
    sampling. Below 1, something other than rounding told them apart."""
    compared = [a for a in answers if a.equal_tokens is not None]
    whole = [a for a in compared if a.equal_at_width is not False]
    return len(whole) / len(compared) if compared else None
