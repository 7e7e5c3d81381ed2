"""Charts as inline SVG: bars with intervals, curves, columns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from draftsmith.page.style import SERIES

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 14, 38

Curve = Sequence[tuple[float, float]]
"""Points (x, y), x ascending."""


def colour(series: int) -> str:
    """The colour of a series, as CSS."""
    return f"var(--c{series % SERIES})"


@dataclass(frozen=True)
class Bar:
    """One bar: its text, value and perhaps interval; colour as CSS; shown: the value as text."""

    label: str
    value: float
    shown: str
    colour: str
    low: float | None = None
    high: float | None = None


def bars(groups: Mapping[str, Sequence[Bar]], label: str) -> str:
    """Horizontal bars from 0 on in named groups (a group named "" has no heading), with whiskers where there is
    an interval; `label` says what the length is."""
    drawn = {name: group for name, group in groups.items() if group}
    if not drawn:
        return '<p class="dim">nothing was measured</p>'
    everything = [bar for group in drawn.values() for bar in group]
    texts = max(len(bar.label) for bar in everything)
    left = min(180, 18 + 7 * texts)
    right = 24 + 7 * max(len(bar.shown) for bar in everything)
    longest = max(bar.value for bar in everything)
    most = min(max(bar.high or bar.value for bar in everything), 1.6 * longest)  # wilder intervals run off the edge
    scale = (WIDTH - left - right) / max(most, 1e-9)

    def at(value: float) -> float:
        return left + min(max(value, 0.0), most) * scale

    marks, y = [], 4.0
    for name, group in drawn.items():
        if name:
            marks.append(f'<text class="strong" x="0" y="{y + 12:.1f}">{escape(name)}</text>')
            y += 20
        for bar in group:
            middle = y + 10
            end = at(bar.high if bar.high is not None else bar.value)
            marks.append(
                f'<text x="{left - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(_short(bar.label))}</text>'
                f'<rect x="{left}" y="{y + 2:.1f}" width="{at(bar.value) - left:.1f}" height="16" rx="3" '
                f'style="fill: {bar.colour}"><title>{escape(bar.label)}: {escape(bar.shown)}</title></rect>'
                f'<text class="strong" x="{max(end, at(bar.value)) + 8:.1f}" y="{middle + 4:.1f}">'
                f"{escape(bar.shown)}</text>"
            )
            if bar.low is not None and bar.high is not None:
                low, high = at(bar.low), at(bar.high)
                marks.append(
                    f'<path class="whisker" d="M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 4:.1f}v8'
                    f'M{high:.1f} {middle - 4:.1f}v8"/>'
                )
            y += 24
        y += 8
    return _svg("".join(marks), label, y)


def line_chart(
    curves: Mapping[str, Curve], label: str, *, bounds: tuple[float, float] | None = None, ordered: bool = False
) -> str:
    """Named curves over a shared axis; `label` names the x axis, `bounds` are those of y (left out: the data's).
    Points that are not finite are left out, and so are curves without a point. ordered: the curves are steps of one
    thing (slots, labels), and have one colour that fades from the first to the last."""
    finite = {name: [(x, y) for x, y in curve if math.isfinite(y)] for name, curve in curves.items()}
    drawn = {name: curve for name, curve in finite.items() if curve}
    if not drawn:
        return "<p>nothing was logged</p>"
    xs = [x for curve in drawn.values() for x, _ in curve]
    ys = [y for curve in drawn.values() for _, y in curve]
    low_x, high_x = min(xs), max(xs)
    low_y, high_y = bounds or (min(ys), max(ys))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        share_x = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        share_y = (y - low_y) / (high_y - low_y) if high_y > low_y else 0.5
        return LEFT + width * share_x, TOP + height * (1.0 - share_y)

    marks = []
    for value in _ticks(low_y, high_y, 4):
        at = place(low_x, value)[1]
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        marks.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:,.6g}</text>')
    for value in _ticks(low_x, high_x, 6, whole=all(x == int(x) for x in xs)):
        x = place(value, low_y)[0]
        marks.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    marks.append(f'<text x="{LEFT + width / 2}" y="{HEIGHT - 2}" text-anchor="middle">{escape(label)}</text>')
    dots = max(len(curve) for curve in drawn.values()) <= 32
    colours = _faded(len(drawn)) if ordered else [colour(number) for number in range(len(drawn))]
    for number, (name, curve) in enumerate(drawn.items()):
        points = [place(*point) for point in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f"stroke: {colours[number]}"
        marks.append(f'<polyline points="{line}" style="{style}"><title>{escape(name)}</title></polyline>')
        if dots:
            marks += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" style="fill: {colours[number]}">'
                f"<title>{escape(name)}: {value:.4g} at {step:g}</title></circle>"
                for (x, y), (step, value) in zip(points, curve, strict=True)
            ]
    return _svg("".join(marks), label, HEIGHT) + keys(list(drawn), colours) * (len(drawn) > 1)


def columns(series: Mapping[str, Sequence[float]], label: str, *, width: int = WIDTH) -> str:
    """Shares as grouped columns: entry i of every series stands over i+1; `label` names the x axis, `width` says how
    wide the drawing is beside others (`WIDTH`)."""
    drawn = {name: values for name, values in series.items() if sum(values) > 0}
    if not drawn:
        return '<p class="dim">No verify ran.</p>'
    places = max(len(values) for values in drawn.values())
    highest = max(max(values) for values in drawn.values())
    step = (width - LEFT - RIGHT) / places
    wide = 0.78 * step / len(drawn)
    base, height = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP - 14
    marks = [f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{base}" y2="{base}"/>']
    for place in range(places):
        middle = LEFT + (place + 0.5) * step
        marks.append(f'<text x="{middle:.1f}" y="{base + 18}" text-anchor="middle">{place + 1}</text>')
        for number, (name, values) in enumerate(drawn.items()):
            share = values[place] if place < len(values) else 0.0
            high, left = height * share / highest, middle - 0.39 * step + number * wide
            marks.append(
                f'<rect x="{left:.1f}" y="{base - high:.1f}" width="{max(wide - 1.5, 1):.1f}" height="{high:.1f}" '
                f'rx="2" style="fill: {colour(number)}"><title>{escape(name)}, {place + 1}: {share:.1%}</title></rect>'
            )
            if wide >= 26:
                marks.append(
                    f'<text x="{left + wide / 2:.1f}" y="{base - high - 5:.1f}" text-anchor="middle">{share:.0%}</text>'
                )
    marks.append(f'<text x="{width / 2}" y="{HEIGHT - 2}" text-anchor="middle">{escape(label)}</text>')
    return _svg("".join(marks), label, HEIGHT, width) + keys(list(drawn)) * (len(drawn) > 1)


def keys(names: Sequence[str], colours: Sequence[str] | None = None) -> str:
    """A legend of series in their order; colours: theirs as CSS (None: those of series)."""
    shown = colours or [colour(number) for number in range(len(names))]
    spans = (f'<span class="key" style="--k: {k}">{escape(name)}</span>' for name, k in zip(names, shown, strict=True))
    return f'<div class="keys">{"".join(spans)}</div>'


def _svg(marks: str, label: str, height: float, width: int = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(label)}">{marks}</svg>'


def _faded(count: int) -> list[str]:
    """So many shades of one colour, as CSS, from full to two fifths, which are seen on dark paper as well."""
    shares = (100 - 60 * number / max(count - 1, 1) for number in range(count))
    return [f"color-mix(in srgb, var(--c0) {share:.0f}%, var(--card))" for share in shares]


def _short(text: str) -> str:
    return text if len(text) <= 24 else text[:11] + "…" + text[-12:]


def _ticks(low: float, high: float, wanted: int, *, whole: bool = False) -> list[float]:
    """About so many round numbers in [low, high], of them only whole ones where asked."""
    if high <= low:
        return [low if whole else float(f"{low:.4g}")]
    raw = (high - low) / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    if whole:
        step = math.ceil(step)
    first = math.ceil(low / step)
    return [tick * step for tick in range(first, math.floor(high / step + 1e-9) + 1)]
