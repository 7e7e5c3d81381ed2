"""Pieces of an HTML page that needs nothing else: inline SVG, no scripts, no network."""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 32

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #667085; --paper: #ffffff; --grid: #d5dae3;
  --c0: #3b6fd4; --c1: #d4703b; --c2: #2e9e6b; --c3: #9a4fc4; --c4: #b8902a; --c5: #c43f5c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9f0; --dim: #98a2b3; --paper: #12161f; --grid: #344054; --c0: #7aa2f7; --c1: #f0a070; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 720px;
  margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--grid); }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 12px; } svg line { stroke: var(--grid); }
svg polyline { fill: none; stroke-width: 1.8; } .key { margin-right: 1rem; font-size: .9rem; }
"""
_COLOURS = 6

Curve = Sequence[tuple[float, float]]
"""Points (x, y), x ascending."""


def line_chart(curves: dict[str, Curve], label: str) -> str:
    """An SVG of named curves over a shared axis; `label` names the x axis. Curves without a point are left out."""
    drawn = {name: curve for name, curve in curves.items() if curve}
    if not drawn:
        return "<p>nothing was logged</p>"
    xs = [x for curve in drawn.values() for x, _ in curve]
    ys = [y for curve in drawn.values() for _, y in curve]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        share_x = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        share_y = (y - low_y) / (high_y - low_y) if high_y > low_y else 0.5
        return LEFT + width * share_x, TOP + height * (1.0 - share_y)

    marks = []
    for share in (0.0, 0.5, 1.0):
        value, at = low_y + share * (high_y - low_y), TOP + height * (1.0 - share)
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    marks.append(f'<text x="{LEFT}" y="{HEIGHT - 12}">{low_x:g}</text>')
    marks.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">{high_x:g}</text>')
    marks.append(f'<text x="{LEFT + width / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(label)}</text>')
    keys = []
    for number, (name, curve) in enumerate(drawn.items()):
        colour = f"var(--c{number % _COLOURS})"
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        marks.append(f'<polyline points="{points}" style="stroke: {colour}"><title>{escape(name)}</title></polyline>')
        if len(curve) == 1:
            x, y = place(*curve[0])
            marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill: {colour}"/>')
        keys.append(f'<span class="key" style="color: {colour}">{escape(name)}</span>')
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(marks)}</svg>'
    return f"{svg}<div>{''.join(keys)}</div>"


def fact_table(rows: Sequence[tuple[str, str]]) -> str:
    """An HTML table of two columns."""
    body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{body}</table>"


def page(title: str, body: str) -> str:
    """The whole document; `body` is HTML, `title` text."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )
