"""What a benchmark found: accept lengths, speeds and equality, as numbers that are computed here and nowhere else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from draftsmith.errors import DraftsmithError


class Speed(BaseModel):
    """New tokens and the seconds of wall time they took, prefill included."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens of a second of wall time."""
        return self.tokens / self.seconds


class PromptResult(BaseModel):
    """One prompt: tokens committed by each verify, and how many of its tokens are those of plain decoding.

    `equal_tokens` and `plain_tokens` are None where plain decoding says nothing about equality (sampling).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    category: str | None
    prompt_tokens: int
    new_tokens: int
    accept_lengths: list[int]
    finish_reason: str
    equal_tokens: int | None
    plain_tokens: int | None


class BenchReport(BaseModel):
    """One benchmark of a draft against its target, as written to `bench.json`.

    `setting` says what was measured where: target, draft, device, dtype, threads, options and versions.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    setting: dict[str, Any]
    plain: Speed
    speculative: Speed
    prompts: list[PromptResult]

    @property
    def accept_length(self) -> float | None:
        """Mean tokens committed per verify, over all verifies; None when no verify ran."""
        return mean([length for prompt in self.prompts for length in prompt.accept_lengths])

    @property
    def histogram(self) -> list[int]:
        """Entry n-1: the number of verifies that committed n tokens."""
        return histogram([length for prompt in self.prompts for length in prompt.accept_lengths])

    @property
    def accept_length_by_category(self) -> dict[str, float]:
        """Category -> mean tokens committed per verify, in the order of first appearance."""
        lengths: dict[str, list[int]] = {}
        for prompt in self.prompts:
            lengths.setdefault(prompt.category or "uncategorised", []).extend(prompt.accept_lengths)
        means = {category: mean(values) for category, values in lengths.items()}
        return {category: value for category, value in means.items() if value is not None}

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    @property
    def equal_share(self) -> float | None:
        """Share of tokens that equal plain greedy decoding's at the same place; None when sampling.

        A missing or surplus token at the end counts as a difference.
        """
        compared = [p for p in self.prompts if p.equal_tokens is not None and p.plain_tokens is not None]
        total = sum(max(p.new_tokens, p.plain_tokens or 0) for p in compared)
        return sum(p.equal_tokens or 0 for p in compared) / total if total else None

    def summary(self) -> dict[str, Any]:
        """The derived numbers, as they stand in `bench.json` under `summary`."""
        return {
            "accept_length": self.accept_length,
            "accept_length_by_category": self.accept_length_by_category,
            "histogram": self.histogram,
            "plain_tokens_per_second": self.plain.tokens_per_second,
            "speculative_tokens_per_second": self.speculative.tokens_per_second,
            "speedup": self.speedup,
            "equal_share": self.equal_share,
            "prompts": len(self.prompts),
            "new_tokens": self.speculative.tokens,
        }

    def to_json(self) -> dict[str, Any]:
        """The report as `bench.json` holds it: `summary`, then the fields, which `read_report` reads."""
        return {"summary": self.summary(), **self.model_dump()}


def mean(values: Sequence[int]) -> float | None:
    """The arithmetic mean; None of nothing."""
    return sum(values) / len(values) if values else None


def histogram(accept_lengths: Sequence[int]) -> list[int]:
    """Counts by accept length: entry n-1 counts the verifies that committed n >= 1 tokens."""
    counts = [0] * max(accept_lengths, default=0)
    for length in accept_lengths:
        counts[length - 1] += 1
    return counts


def equal_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """How many places hold the same token in both."""
    return sum(a == b for a, b in zip(left, right, strict=False))


def read_report(path: Path) -> BenchReport:
    """The report of a `bench.json`; raises `DraftsmithError` where it is damaged."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return BenchReport.model_validate({name: value for name, value in fields.items() if name != "summary"})
    except (ValueError, AttributeError) as error:  # not JSON, not an object, other fields
        raise DraftsmithError(
            f"{path} is not a report that bench wrote ({error}); remove it and run `draftsmith bench` again"
        ) from error
