"""The benchmark as one HTML page that needs nothing else: figures drawn as inline SVG, no scripts, no network."""

from collections.abc import Sequence
from html import escape

from draftsmith.bench.report import BenchReport, mean

WIDTH, HEIGHT, MARGIN = 640, 260, 40

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #667085; --bar: #3b6fd4; --line: #d5dae3; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9f0; --dim: #98a2b3; --bar: #7aa2f7; --line: #344054; --paper: #12161f; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 720px;
  margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .6rem .25rem 0;
  border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 12px; } svg rect { fill: var(--bar); }
svg line { stroke: var(--line); } .dim { color: var(--dim); }
"""


def bar_chart(counts: Sequence[int], axis_label: str) -> str:
    """An SVG bar chart of `counts`; the bar of entry i is labelled i+1, and each bar carries its share."""
    total, highest = sum(counts), max(counts, default=0)
    if total == 0:
        return '<p class="dim">No verify ran.</p>'
    step = (WIDTH - 2 * MARGIN) / len(counts)
    base = HEIGHT - MARGIN
    marks = [f'<line x1="{MARGIN}" y1="{base}" x2="{WIDTH - MARGIN}" y2="{base}"/>']
    for index, count in enumerate(counts):
        height = (HEIGHT - 2 * MARGIN) * count / highest
        left, middle = MARGIN + index * step, MARGIN + (index + 0.5) * step
        marks.append(
            f'<rect x="{left + step * 0.1:.1f}" y="{base - height:.1f}" width="{step * 0.8:.1f}" height="{height:.1f}">'
            f"<title>{index + 1}: {count}</title></rect>"
            f'<text x="{middle:.1f}" y="{base + 16}" text-anchor="middle">{index + 1}</text>'
            f'<text x="{middle:.1f}" y="{base - height - 5:.1f}" text-anchor="middle">{count / total:.0%}</text>'
        )
    marks.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(axis_label)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axis_label)}">{"".join(marks)}</svg>'


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}{suffix}"


def percent(share: float | None) -> str:
    """A share as a percentage that says 100 only when it is whole."""
    if share is None:
        return "-"
    return "100 %" if share == 1.0 else f"{min(share * 100, 99.99):.2f} %"


def summary_rows(report: BenchReport) -> list[tuple[str, str]]:
    """The headline figures (label, value), for the page and the console alike."""
    return [
        ("accept length (tokens per verify)", number(report.accept_length)),
        ("plain tokens/s", number(report.plain.tokens_per_second, 1)),
        ("speculative tokens/s", number(report.speculative.tokens_per_second, 1)),
        ("speed-up", number(report.speedup, 2, "x")),
        ("tokens equal to plain greedy decoding", percent(report.equal_share)),
        ("prompts / new tokens", f"{len(report.prompts)} / {report.speculative.tokens:,}"),
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> str:
    """An HTML table; columns from `numbers_from` on are set as numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [' class="number"' if column >= numbers_from else "" for column in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    head = f"<tr>{cells('th', header)}</tr>" if header else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>{head}{body}</table>"


def render_page(report: BenchReport) -> str:
    """The whole page as HTML."""
    setting = report.setting
    categories = [(name, number(value)) for name, value in report.accept_length_by_category.items()]
    prompts = [
        (p.id, p.category or "", str(p.new_tokens), number(mean(p.accept_lengths)), p.finish_reason)
        for p in report.prompts
    ]
    facts = [(name, str(value)) for name, value in setting.items()]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>draftsmith bench</title><style>{STYLE}</style></head><body>
<h1>Speculative decoding: {escape(str(setting.get("draft", "")))}</h1>
{table((), summary_rows(report), numbers_from=1)}
<h2>Tokens committed per verify</h2>
{bar_chart(report.histogram, "accept length")}
<h2>By category</h2>
{table(("category", "accept length"), categories, numbers_from=1)}
<h2>By prompt</h2>
{table(("prompt", "category", "new tokens", "accept length", "finish"), prompts, numbers_from=2)}
<h2>Setting</h2>
{table((), facts, numbers_from=1)}
</body></html>
"""
