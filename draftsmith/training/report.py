"""`report.html`: a run's curves and settings on one page, made from its `metrics.jsonl`."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from draftsmith.page.charts import Curve, line_chart
from draftsmith.page.document import fact_table, figure, page
from draftsmith.training.record import RunRecord
from draftsmith.training.tracking import METRICS_FILE

REPORT_FILE = "report.html"

# What is drawn together, in this order, under which title; any other number of an entry gets a chart of its own.
_TOGETHER = {
    "loss": ("train loss", "eval loss"),
    "accept length": ("train accept_length", "eval accept_length", "eval generate_accept_length"),
    "learning rate": ("train lr",),
    "gradient norm": ("train grad_norm",),
    "tokens per second": ("train tokens_per_second",),
    "memory, GiB": ("train memory_gib",),
    "share of the time spent waiting for data": ("train data_wait",),
    "model FLOP utilisation": ("train mfu",),
}
_NAMES = {"train": "training", "eval": "held out", "eval generate_accept_length": "by the engine"}
_HEADLINES = ("accept length", "loss", "tokens per second")
_NOT_DRAWN = {"kind", "step", "epoch"}


def write_run_report(run_dir: Path, record: RunRecord, outcome: list[tuple[str, str]]) -> Path:
    """Write the page of a run that keeps `metrics.jsonl`; `outcome` are facts about its end. Returns its path."""
    entries = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]
    curves = curves_of(entries)
    figures = [
        figure(line_chart(found, "step", ordered=ordered), title=title) for title, found, ordered in _charts(curves)
    ]
    drawn = f'<div class="pair">{"".join(figures)}</div>'
    parts = [
        f'<div class="facts">{"".join(_cards(curves))}</div>' if curves else "",
        f'<div class="card" style="margin-top: 1rem">{fact_table(outcome)}</div>',
        "<h2>Curves</h2>",
        drawn if figures else '<p class="dim">The run ended before its first entry was logged.</p>',
    ]
    for title, section in (("Draft", record.draft_section), ("Training", record.options)):
        parts.append(f'<h2>{title}</h2><div class="card">{fact_table(list(_settings(section)))}</div>')
    path = run_dir / REPORT_FILE
    head = f"{record.draft_section['algorithm']} for {str(record.target['source']).rsplit('/', 1)[-1]}"
    text = page(f"Training: {'/'.join(run_dir.resolve().parts[-2:])}", "\n".join(parts), head)
    path.write_text(text, encoding="utf-8")
    return path


def _charts(curves: Mapping[str, Curve]) -> Iterator[tuple[str, dict[str, Curve], bool]]:
    """(title, curves by the names of their legend, whether they are labels in their order) of every chart."""
    for title, names in _TOGETHER.items():
        found = {_NAMES.get(name) or _NAMES[name.split()[0]]: curves[name] for name in names if name in curves}
        if found:
            yield title, found, False
    drawn = {name for names in _TOGETHER.values() for name in names}
    others: dict[str, dict[str, Curve]] = {}
    for name in curves:
        if name not in drawn:
            stem, _, label = name.partition(" label ")
            others.setdefault(stem, {})[label] = curves[name]
    for stem, labels in others.items():
        kind, _, what = stem.partition(" ")
        several = len(labels) > 1
        found = {f"label {label}": labels[label] for label in sorted(labels, key=int)} if several else labels
        yield f"{what.replace('_', ' ')}, {_NAMES[kind]}", found, several


def _cards(curves: Mapping[str, Curve]) -> Iterator[str]:
    """The last values of what a run is judged by; of several kinds of one figure, the one nearest to use."""
    for title in _HEADLINES:
        name = next((name for name in reversed(_TOGETHER[title]) if name in curves), None)
        if name is not None:
            step, value = curves[name][-1]
            shown = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
            whose = _NAMES.get(name) or _NAMES[name.split()[0]]
            yield (
                f'<div class="card"><div class="name">{escape(title)}</div><div class="big">{shown}</div>'
                f'<div class="what">{escape(whose)}, at step {step:,.0f}</div></div>'
            )


def _settings(section: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The settings that are given, nested ones by dotted names."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{before}{name}.")
        elif value is not None:
            yield before + name, str(value)


def curves_of(entries: list[dict[str, Any]]) -> dict[str, Curve]:
    """Every logged number over the steps, as `train loss`, `eval accuracy label 2`."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        for name, value in entry.items():
            if name in _NOT_DRAWN:
                continue
            named = f"{entry['kind']} {name}"
            values = {f"{named} label {i + 1}": v for i, v in enumerate(value)} if isinstance(value, list) else {}
            for key, number in (values or {named: value}).items():
                if isinstance(number, int | float):
                    curves.setdefault(key, []).append((float(entry["step"]), float(number)))
    return dict(curves)
