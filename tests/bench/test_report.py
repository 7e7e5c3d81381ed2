"""The arithmetic of the benchmark report, against counts made by hand, and the page that shows it."""

import random
import xml.etree.ElementTree as ElementTree

import pytest
from pydantic import ValidationError

from draftsmith.bench.options import BenchOptions
from draftsmith.bench.page import bar_chart, percent, render_page, summary_rows
from draftsmith.bench.report import BenchReport, PromptResult, Speed, equal_tokens, histogram, mean, read_report
from draftsmith.errors import DraftsmithError


def result(identity: str, lengths: list[int], category: str | None = None, **fields: object) -> PromptResult:
    new_tokens = 1 + sum(lengths)  # one token is sampled at prefill and belongs to no verify
    values = {"new_tokens": new_tokens, "equal_tokens": new_tokens, "plain_tokens": new_tokens} | fields
    return PromptResult(
        id=identity, category=category, prompt_tokens=5, accept_lengths=lengths, finish_reason="stop", **values
    )


def report(*prompts: PromptResult) -> BenchReport:
    return BenchReport(
        setting={"draft": "runs/<d>", "block_size": 7},
        plain=Speed(tokens=100, seconds=10.0),
        speculative=Speed(tokens=100, seconds=4.0),
        prompts=list(prompts),
    )


def test_accept_length_is_the_mean_over_verifies_not_over_prompts():
    made = report(result("a", [1, 1, 1, 1], "lists"), result("b", [6], "code"), result("c", [], "lists"))
    assert made.accept_length == pytest.approx(10 / 5)
    assert made.accept_length_by_category == {"lists": 1.0, "code": 6.0}
    assert made.histogram == [4, 0, 0, 0, 0, 1]


def test_histogram_equals_a_plain_count():
    draw = random.Random(3)
    lengths = [draw.randint(1, 7) for _ in range(500)]
    assert histogram(lengths) == [lengths.count(n) for n in range(1, max(lengths) + 1)]
    assert sum(histogram(lengths)) == len(lengths)
    assert histogram([]) == []
    assert mean([]) is None


def test_speed_and_speedup():
    made = report(result("a", [2]))
    assert made.plain.tokens_per_second == pytest.approx(10)
    assert made.speculative.tokens_per_second == pytest.approx(25)
    assert made.speedup == pytest.approx(2.5)


def test_equality_counts_places_and_ends():
    assert equal_tokens([1, 2, 3, 4], [1, 2, 9, 4]) == 3
    whole = report(result("a", [3, 3]), result("b", [2]))
    assert whole.equal_share == 1.0
    one_wrong = report(result("a", [3, 3], equal_tokens=6), result("b", [2]))
    assert one_wrong.equal_share == pytest.approx(9 / 10)
    # Two tokens fewer than plain decoding gave are two differences, though all that are there agree.
    too_short = report(result("a", [3, 3], equal_tokens=7, plain_tokens=9))
    assert too_short.equal_share == pytest.approx(7 / 9)
    sampled = report(result("a", [3], equal_tokens=None, plain_tokens=None))
    assert sampled.equal_share is None


def test_a_share_below_one_is_never_shown_as_whole():
    assert percent(1.0) == "100 %"
    assert percent(0.999999) == "99.99 %"
    assert percent(0.5) == "50.00 %"
    assert percent(None) == "-"


def test_json_round_trip(tmp_path):
    import json

    made = report(result("a", [1, 4], "lists"), result("b", [2, 2, 2]))
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(made.to_json()))
    assert read_report(path) == made
    assert json.loads(path.read_text())["summary"]["accept_length"] == made.accept_length


def test_bars_are_as_high_as_their_counts():
    counts = [8, 4, 0, 2]
    svg = ElementTree.fromstring(bar_chart(counts, "accept length"))
    heights = [float(bar.attrib["height"]) for bar in svg.iter("rect")]
    assert heights == pytest.approx([heights[0] * count / 8 for count in counts], abs=0.1)
    assert heights[0] > 0
    labels = [text.text for text in svg.iter("text")]
    assert {"1", "4", "57%", "29%", "0%", "14%", "accept length"} <= set(labels)
    assert "No verify ran" in bar_chart([], "accept length")


def test_page_needs_nothing_from_elsewhere_and_escapes_names():
    page = render_page(report(result("<script>", [1, 3], "a&b"), result("b", [])))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "a&amp;b" in page
    assert "http" not in page
    for label, value in summary_rows(report(result("<script>", [1, 3], "a&b"), result("b", []))):
        assert label in page
        assert value in page


@pytest.mark.parametrize("content", ["{", "[1]", '{"summary": {}}'])
def test_a_damaged_report_is_an_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(DraftsmithError, match=r"(?s)bench\.json is not a report .*run `draftsmith bench` again"):
        read_report(path)


@pytest.mark.parametrize(("name", "value"), [("temperature", float("inf")), ("seed", -1), ("seed", 2**63)])
def test_sampling_that_the_engine_would_refuse_is_refused_by_the_recipe(name, value):
    with pytest.raises(ValidationError, match=name):
        BenchOptions(**{name: value})
