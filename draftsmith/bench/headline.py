"""The headline figures of a benchmark as text, for the console."""

from draftsmith.bench.figures import Figures, all_figures
from draftsmith.bench.intervals import Estimate
from draftsmith.bench.records import PLAIN, BenchReport


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}{suffix}"


def estimate(value: Estimate | None, digits: int = 2, suffix: str = "") -> str:
    """`3.61 (3.40 to 3.82)`; a dash where there is none."""
    if value is None:
        return "-"
    text = number(value.value, digits, suffix)
    if value.low is None or value.high is None:
        return text
    return f"{text} ({value.low:,.{digits}f} to {value.high:,.{digits}f})"


def plural(count: int, one: str, several: str) -> str:
    """`1 prompt`, `3 prompts`."""
    return f"{count:,} {one if count == 1 else several}"


def percent(share: float | None) -> str:
    """A share as a percentage that says 100 only when it is whole."""
    if share is None:
        return "-"
    return "100 %" if share == 1.0 else f"{min(share * 100, 99.99):.2f} %"


def summary_rows(report: BenchReport) -> list[tuple[str, str]]:
    """The headline figures (label, value) of every draft at every batch size, for the console."""
    figures = all_figures(report)
    plain = {f.batch_size: f for f in figures if f.decoder == PLAIN}
    several = len(report.drafts) > 1 or len(report.batch_sizes) > 1
    rows: list[tuple[str, str]] = []
    for found in figures:
        if found.decoder != PLAIN:
            rows += _rows(found, plain[found.batch_size], several)
    return rows


def _rows(found: Figures, plain: Figures, several: bool) -> list[tuple[str, str]]:
    where = f"{found.decoder}, batch {found.batch_size}: " if several else ""
    speed, base = found.tokens_per_second, plain.tokens_per_second
    return [
        (f"{where}accept length (tokens per verify)", estimate(found.accept_length)),
        (f"{where}plain tokens/s", number(None if base is None else base.value, 1)),
        (f"{where}speculative tokens/s", number(None if speed is None else speed.value, 1)),
        (f"{where}speed-up", estimate(found.speedup, 2, "x")),
        (f"{where}tokens equal to plain greedy decoding", percent(found.equal_share)),
        (f"{where}answers equal to it, at its own or the verify's width", percent(found.equal_at_width)),
        (f"{where}prompts / new tokens", f"{found.prompts} / {found.new_tokens:,}"),
    ]
