import re
from xml.etree import ElementTree

import pytest

from draftsmith.page.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, line_chart
from draftsmith.training.report import curves_of
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from tests.training.counting import QUIET, options, section


def test_a_run_ends_with_a_page_of_its_curves(target, store, run_dir):
    def run(steps, resume):
        train(
            section=section(),
            target=target,
            source=StoreSource(store),
            run_dir=run_dir,
            options=options(max_steps=steps, eval_every=2),
            track=QUIET.model_copy(update={"peak_tflops": 0.001}),
            resume=resume,
        )
        return (run_dir / "report.html").read_text()

    first = run(4, False)
    second = run(6, True)
    assert "4 of 4 (finished)" in first
    assert "6 of 6 (finished)" in second
    for text in ("loss", "accept length", "model FLOP utilisation", "share of the time spent waiting for data"):
        assert f"<h3>{text}</h3>" in second
    assert "num_anchors" in second
    assert "http" not in second
    (loss,) = re.findall(r"<figure><h3>loss</h3>(.*?)</figure>", second)
    (curve,) = re.findall(r'points="([^"]*)"[^>]*><title>training<', loss)
    assert "<title>held out<" in loss
    assert len(curve.split()) == 6  # a resumed run shows the steps before it too


def test_curves_are_drawn_where_their_numbers_are():
    chart = line_chart({"a": [(0.0, 1.0), (5.0, 3.0), (10.0, 2.0)], "empty": []}, "step")
    svg = ElementTree.fromstring(chart[: chart.index("</svg>") + len("</svg>")])
    (line,) = svg.findall("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    assert points[0] == pytest.approx((LEFT, HEIGHT - BOTTOM), abs=0.1)
    assert points[1] == pytest.approx(((LEFT + WIDTH - RIGHT) / 2, TOP), abs=0.1)
    assert points[2][0] == pytest.approx(WIDTH - RIGHT, abs=0.1)
    assert line_chart({"empty": []}, "step") == "<p>nothing was logged</p>"


def test_lists_become_a_curve_a_label_and_gaps_are_left_out():
    entries = [
        {"kind": "eval", "step": 1, "loss": None, "accuracy": [0.5, None]},
        {"kind": "eval", "step": 3, "loss": 2.0, "accuracy": [0.75, 0.25]},
    ]
    assert curves_of(entries) == {
        "eval accuracy label 1": [(1.0, 0.5), (3.0, 0.75)],
        "eval accuracy label 2": [(3.0, 0.25)],
        "eval loss": [(3.0, 2.0)],
    }
