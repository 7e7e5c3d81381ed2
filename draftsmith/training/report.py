"""`report.html`: a run's curves and settings on one page, made from its `metrics.jsonl`."""

import json
from pathlib import Path
from typing import Any

from draftsmith.page.charts import Curve, line_chart
from draftsmith.page.document import fact_table, figure, page
from draftsmith.training.record import RunRecord
from draftsmith.training.tracking import METRICS_FILE

REPORT_FILE = "report.html"

# What is drawn together, in this order; any other number of an entry gets a chart of its own.
_TOGETHER = {
    "loss": ("train loss", "eval loss"),
    "accept length": ("train accept_length", "eval accept_length", "eval generate_accept_length"),
    "learning rate": ("train lr",),
    "gradient norm": ("train grad_norm",),
    "tokens per second": ("train tokens_per_second",),
}
_NOT_DRAWN = {"kind", "step", "epoch"}


def write_run_report(run_dir: Path, record: RunRecord, outcome: list[tuple[str, str]]) -> Path:
    """Write the page of a run that keeps `metrics.jsonl`; `outcome` are facts about its end. Returns its path."""
    entries = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]
    curves = curves_of(entries)
    charts = dict(_TOGETHER)
    drawn = {name for names in charts.values() for name in names}
    for name in curves:
        stem = name.split(" label ")[0]
        if name not in drawn:
            charts[stem] = (*charts.get(stem, ()), name)
    figures = []
    for title, names in charts.items():
        found = {name: curves[name] for name in names if name in curves}
        if found:
            figures.append(figure(line_chart(found, "step"), title=title))
    parts = [
        f'<div class="card">{fact_table(outcome)}</div>',
        "<h2>Curves</h2>",
        f'<div class="pair">{"".join(figures)}</div>',
    ]
    for title, section in (("Draft", record.draft_section), ("Training", record.options)):
        rows = fact_table([(name, str(value)) for name, value in section.items()])
        parts.append(f'<h2>{title}</h2><div class="card">{rows}</div>')
    path = run_dir / REPORT_FILE
    head = f"{record.draft_section['algorithm']} for {str(record.target['source']).rsplit('/', 1)[-1]}"
    text = page(f"Training: {run_dir.resolve().name}", "\n".join(parts), head)
    path.write_text(text, encoding="utf-8")
    return path


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
