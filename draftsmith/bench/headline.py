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
    """The headline figures (label, value) of every draft at every batch size."""
    figures = all_figures(report)
    plain = {f.batch_size: f for f in figures if f.decoder == PLAIN}
    several = len(report.drafts) > 1 or len(report.batch_sizes) > 1
    rows: list[tuple[str, str]] = []
    for found in figures:
        if found.decoder != PLAIN:
            rows += _rows(found, plain[found.batch_size], several)
    return rows


def summary_lines(report: BenchReport) -> list[str]:
    """The headline figures for the console: of one draft at one batch size one a line, of several a table."""
    if len(report.drafts) == 1 and len(report.batch_sizes) == 1:
        return [f"{label}: {value}" for label, value in summary_rows(report)]
    figures = all_figures(report)
    header = ("batch", "decoder", "accept length", "tokens/s", "speed-up", "decode speed-up", "first token", "cycle")
    cells = [header, *(_cells(found) for found in figures)]
    if any(found.equal_at_width is not None for found in figures):
        equal = ("equal answers", *(percent(found.equal_at_width) for found in figures))
        cells = [(*row, last) for row, last in zip(cells, equal, strict=True)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def milliseconds(seconds: float | None, digits: int) -> str:
    """Seconds as milliseconds; a dash where there are none."""
    return "-" if seconds is None else number(seconds * 1e3, digits, " ms")


def gibibytes(size: int | None) -> str:
    """Bytes as GiB; a dash where they are not known."""
    return "-" if size is None else number(size / 2**30, 2, " GiB")


def _cells(found: Figures) -> tuple[str, ...]:
    return (
        str(found.batch_size),
        found.decoder,
        estimate(found.accept_length),
        number(None if found.tokens_per_second is None else found.tokens_per_second.value, 1),
        estimate(found.speedup, 2, "x"),
        estimate(found.decode_speedup, 2, "x"),
        milliseconds(found.first_token_seconds, 1),
        milliseconds(found.cycle_seconds, 2),
    )


def _rows(found: Figures, plain: Figures, several: bool) -> list[tuple[str, str]]:
    where = f"{found.decoder}, batch {found.batch_size}: " if several else ""
    speed, base = found.tokens_per_second, plain.tokens_per_second
    rows = [
        ("accept length (tokens per verify)", estimate(found.accept_length)),
        ("plain tokens/s", number(None if base is None else base.value, 1)),
        ("speculative tokens/s", number(None if speed is None else speed.value, 1)),
        ("speed-up", estimate(found.speedup, 2, "x")),
        ("speed-up after the first token", estimate(found.decode_speedup, 2, "x")),
        ("time to the first token", milliseconds(found.first_token_seconds, 1)),
        ("time of a cycle", milliseconds(found.cycle_seconds, 2)),
    ]
    if found.memory_bytes is not None:
        rows.append(("memory", gibibytes(found.memory_bytes)))
    if found.equal_share is not None:
        rows.append(("tokens equal to plain greedy decoding", percent(found.equal_share)))
        rows.append(("answers equal to it, at its own or the verify's width", percent(found.equal_at_width)))
    rows.append(("prompts / new tokens", f"{found.prompts} / {found.new_tokens:,}"))
    return [(where + label, value) for label, value in rows]
