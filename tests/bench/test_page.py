"""The page: what it shows, that it needs nothing else, and that a browser draws it."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html import unescape
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from draftsmith.bench.headline import summary_lines, summary_rows
from draftsmith.bench.page import render_page
from draftsmith.bench.page_text import legend, render_text
from draftsmith.bench.records import PLAIN, ShownText, ShownToken
from draftsmith.page.charts import Bar, bars, columns, line_chart
from draftsmith.page.style import STYLE
from draftsmith.training.report import write_run_report
from tests.bench.made import answer, report

BROWSER = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)

TEXT = ShownText(
    decoder="d",
    prompt="<q>",
    turn=1,
    category="lists",
    question="Why <b>?",
    tokens=[
        ShownToken(text="First", came="prefill", slot=0, target=0.5),
        ShownToken(text=" drafted", came="accepted", slot=1, target=0.9, draft=0.755),
        ShownToken(text="\n\n", came="accepted", slot=2, target=0.8, draft=0.6),
        ShownToken(text=" mended", came="corrected", slot=3, target=0.4, instead=" <wrong>", instead_chance=0.004),
        ShownToken(text="!", came="bonus", slot=6, target=1.0),
    ],
)


def rendered(**fields):
    answers = [answer("<script>", [3, 1, 6, 2], category="a&b"), answer("two", [2, 2]), answer("three", [1, 5, 1])]
    plain = [one.model_copy(update={"decoder": PLAIN}) for one in answers]
    made = report([*plain, *answers]).model_copy(update={"shown": [TEXT], **fields})
    return made, render_page(made)


@pytest.mark.parametrize(
    ("proposals", "said"), [(1, []), (4, ["slot 4"]), (8, ["slot 4", "slot 8"]), (15, ["slot 4", "slot 8 and later"])]
)
def test_the_legend_names_slots_that_drafts_have(proposals: int, said: list[str]) -> None:
    shades = re.findall(r'<i class="a\d">([^<]+)</i>', legend(proposals))
    assert shades == ["accepted, slot 1", *said]


def test_the_page_needs_nothing_from_elsewhere_and_escapes_names():
    _, page = rendered()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "a&amp;b" in page
    assert "http" not in page
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in STYLE
    assert "@media print" in STYLE


def test_categories_are_drawn_where_there_are_some():
    made, page = rendered()
    assert "<h3>By category</h3>" in page
    bare = [one.model_copy(update={"category": None}) for one in made.answers]
    assert "By category" not in render_page(made.model_copy(update={"answers": bare}))


def test_the_page_shows_the_figures_of_the_console():
    made, page = rendered()
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    for label, value in summary_rows(made):
        if "prompts" not in label:
            assert value.removesuffix("x") in text, label


def test_several_decoders_are_a_table_on_the_console_and_one_is_a_list():
    made, _ = rendered()
    assert summary_lines(made) == [f"{label}: {value}" for label, value in summary_rows(made)]
    second = made.decoders[1].model_copy(update={"name": "longer-name", "memory_bytes": {1: 2**30}})
    twice = [one.model_copy(update={"decoder": "longer-name"}) for one in made.answers if one.decoder == "d"]
    rounds = [one.model_copy(update={"decoder": "longer-name"}) for one in made.rounds if one.decoder == "d"]
    fields = {"decoders": [*made.decoders, second], "answers": made.answers + twice, "rounds": made.rounds + rounds}
    lines = summary_lines(made.model_copy(update=fields))
    assert [re.split(r"  +", line.strip())[:2] for line in lines] == [
        ["batch", "decoder"],
        *(["1", name] for name in (PLAIN, "d", "longer-name")),
    ]
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split()[2:] == lines[3].split()[2:]
    assert "equal answers" in lines[0]
    sampled = made.model_copy(
        update={"answers": [a.model_copy(update={"equal_tokens": None, "plain_tokens": None}) for a in made.answers]}
    )
    assert not any("equal" in label for label, _ in summary_rows(sampled))


def test_ticks_of_slots_are_whole():
    svg = ElementTree.fromstring(line_chart({"a": [(1, 0.5), (2, 0.25)]}, "slot", bounds=(0.0, 1.0)))
    assert [text.text for text in svg.iter("text")] == ["0", "0.25", "0.5", "0.75", "1", "1", "2", "slot"]


def test_bars_are_as_long_as_their_values_and_whiskers_stand_at_the_interval():
    group = [Bar("a", 4.0, "4.00", "red", 3.0, 5.0), Bar("b", 2.0, "2.00", "red")]
    svg = ElementTree.fromstring(bars({"group": group}, "length"))
    long, short = (float(bar.get("width")) for bar in svg.iter("rect"))
    assert long == pytest.approx(2 * short, abs=0.2)
    low, high = map(float, re.match(r"M([\d.]+) [\d.]+H([\d.]+)", svg.find("path").get("d")).groups())
    left = float(next(svg.iter("rect")).get("x"))
    assert low - left == pytest.approx(long * 3 / 4, abs=0.2)
    assert high - left == pytest.approx(long * 5 / 4, abs=0.2)
    assert {text.text for text in svg.iter("text")} == {"group", "a", "b", "4.00", "2.00"}


def test_columns_are_as_high_as_their_shares():
    svg = ElementTree.fromstring(columns({"a": [0.6, 0.3, 0.0, 0.1]}, "accept length"))
    heights = [float(bar.get("height")) for bar in svg.iter("rect")]
    assert heights == pytest.approx([heights[0] * share / 0.6 for share in (0.6, 0.3, 0.0, 0.1)], abs=0.1)
    assert {"1", "4", "60%", "30%", "10%", "accept length"} <= {text.text for text in svg.iter("text")}
    assert "No verify ran" in columns({"a": []}, "accept length")


def test_curves_keep_to_their_bounds():
    chart = line_chart({"a": [(1, 0.5), (2, 0.25)]}, "slot", bounds=(0.0, 1.0))
    (line,) = ElementTree.fromstring(chart).findall("polyline")
    (_, first), (_, second) = (map(float, point.split(",")) for point in line.get("points").split())
    assert second - first == pytest.approx(0.25 * (220 - 14 - 38), abs=0.1)
    broken = line_chart({"loss": [(1, 2.0), (2, float("nan")), (3, 1.0)], "gone": [(1, float("inf"))]}, "step")
    (line,) = ElementTree.fromstring(broken).findall("polyline")
    assert len(line.get("points").split()) == 2


def test_every_token_is_marked_by_how_it_came():
    html = render_text(TEXT, True)
    tokens = re.findall(r'<i class="(\w+)" data-tip="([^"]*)">([^<]*)</i>', html)
    assert [kind for kind, _, _ in tokens] == ["p", "a1", "a2", "c", "b"]
    assert [unescape(text) for _, _, text in tokens] == ["First", " drafted", "⏎", " mended", "!"]
    tips = [unescape(tip) for _, tip, _ in tokens]
    assert tips[1] == "drafted and accepted, slot 1\ntarget gave it 90%\ndraft gave it 76%"
    assert tips[3].endswith("draft had said ' <wrong>' (0.4%)")
    assert "Why &lt;b&gt;?" in html
    assert "2 of them drafted" in html


def test_a_text_counts_its_verifies_whole_also_where_the_answers_end_cuts_one():
    came = [("prefill", 0), ("accepted", 1), ("accepted", 2), ("bonus", 3), ("corrected", 1), ("accepted", 1)]
    tokens = [ShownToken(text="x", came=how, slot=slot) for how, slot in came]
    html = render_text(TEXT.model_copy(update={"tokens": tokens}), False)
    assert "6 tokens, 3 of them drafted, in 3 verifies" in html
    tokens[-1] = ShownToken(text="x", came="ended", slot=1)
    html = render_text(TEXT.model_copy(update={"tokens": tokens}), False)
    assert "6 tokens, 2 of them drafted, in 3 verifies" in html
    assert "which is not known" in html


def browser_flags(directory, width, scheme):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory}/profile"]
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    return [BROWSER, *flags, f"--window-size={width},1800", *dark]


def asked_of(page, script, directory, *, width, scheme):
    """What a script finds in a page as a browser laid it out: the page's title is made of it."""
    probe = f"<script>document.title = JSON.stringify((() => {{ {script} }})())</script>"
    path = directory / "probe.html"
    path.write_text(page.replace("</body>", probe + "</body>"), encoding="utf-8")
    command = [*browser_flags(directory, width, scheme), "--dump-dom", f"file://{path}"]
    dumped = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(unescape(re.search(r"<title>(.*?)</title>", dumped.stdout, re.DOTALL).group(1)))


LONG = "smollm2-135m-dspark-of-16-slots-b"
"""A draft's name that does not fit where short ones do."""


def of_two_drafts():
    """As `rendered`, with a second draft that is somewhat slower."""
    made, _ = rendered()
    own = [one for one in made.answers if one.decoder == "d"]
    rounds = report(own).rounds
    slower = [r.model_copy(update={"decoder": LONG, "seconds": 1.25 * r.seconds}) for r in rounds if r.decoder == "d"]
    answers = [one.model_copy(update={"decoder": LONG}) for one in own]
    second = made.decoders[1].model_copy(update={"name": LONG})
    fields = {"decoders": [*made.decoders, second], "rounds": [*rounds, *slower]}
    return render_page(made.model_copy(update={**fields, "answers": [*made.answers, *answers]}))


LAID_OUT = """
const box = r => [r.left + scrollX, r.top + scrollY, r.right + scrollX, r.bottom + scrollY];
const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, range = document.createRange();
  if (!node.data.trim() || node.parentElement.closest('.scroll, script, title')) continue;
  range.selectNodeContents(node);
  const around = node.parentElement.closest('figure, .card, details, main');
  for (const line of range.getClientRects())
    if (line.width > 0) texts.push([node.data, box(line), box(around.getBoundingClientRect())]);
}
const bars = [...document.querySelectorAll('svg rect')].map(
  r => [box(r.getBoundingClientRect()), r.textContent, r.closest('figure').querySelector('h3').textContent]);
return {texts, bars, heading: box(document.querySelector('h1').getBoundingClientRect()),
  wide: document.documentElement.scrollWidth, shown: document.body.innerText,
  strokes: [...document.querySelectorAll('polyline')].map(l => getComputedStyle(l).stroke)};
"""


def colours_of(scheme):
    """The colours that a style sheet gives to names, in a scheme: name -> (red, green, blue)."""
    blocks = {"light": STYLE.split("@media")[0], "dark": STYLE.split("prefers-color-scheme: dark")[1].split("* {")[0]}
    pairs = re.findall(r"--([\w-]+): #([0-9a-f]{6})", blocks[scheme])
    return {name: tuple(bytes.fromhex(digits)) for name, digits in pairs}


def near(pixels, colour):
    return np.abs(pixels.astype(int) - colour).max(-1) <= 8


def check_texts(texts):
    """None reaches out of the card that it is in, or into another one."""
    boxes = np.array([text[1] for text in texts])
    around = np.array([text[2] for text in texts])
    outside = (boxes[:, :2] < around[:, :2] - 1).any(1) | (boxes[:, 2:] > around[:, 2:] + 1).any(1)
    assert [text[0] for text, out in zip(texts, outside, strict=True) if out] == []
    inset = (boxes[:, 3] - boxes[:, 1])[:, None] * [0, 0.25, 0, -0.25] + [1, 0, -1, 0]  # letters do not fill a line
    left, top, right, bottom = (boxes + inset).T
    across = np.minimum(right[:, None], right) - np.maximum(left[:, None], left)
    down = np.minimum(bottom[:, None], bottom) - np.maximum(top[:, None], top)
    meet = np.argwhere(np.triu((across > 0) & (down > 0), 1))
    assert [(texts[one][0], texts[other][0]) for one, other in meet] == []


def check_bars(bars, pixels, colours):
    """Each is filled with its series' colour, from its left to its right end, and what is beyond is not."""
    seen = set()
    for (left, top, right, bottom), title, _ in bars:
        if bottom > len(pixels) or right - left < 12 or bottom - top < 6:
            continue
        name = re.split(r"[:,]", title)[0]
        filled = colours["plain" if name == PLAIN else "c0" if name == "d" else "c1"]
        row = pixels[round(top + 0.2 * (bottom - top))]  # above a whisker, but for the marks of its ends
        inside = near(row[round(left) + 2 : round(right) - 2], filled)
        assert inside[[0, -1]].all(), title
        assert inside.mean() > 0.8, title
        assert not near(row[[round(left) - 2, round(right) + 2]], filled).any(), title
        seen.add(name)
    assert seen == {PLAIN, "d", LONG}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("scheme", "width"), [("light", 500), ("dark", 900)])
def test_a_browser_draws_the_page(scheme, width, tmp_path):
    page = of_two_drafts()
    path, shot = tmp_path / "bench.html", tmp_path / "shot.png"
    path.write_text(page, encoding="utf-8")
    found = asked_of(page, LAID_OUT, tmp_path, width=width, scheme=scheme)
    assert found["wide"] <= width
    for text in (
        "Speculative decoding against plain decoding",
        "How the text came",
        "mended",
        "accept length",
        "times as fast as the target alone",
        "<script>",
    ):
        assert text in found["shown"]
    check_texts(found["texts"])
    assert all(right <= width for (_, _, right, _), _, _ in found["bars"])
    lengths = {title: right - left for (left, _, right, _), title, figure in found["bars"] if figure == "Decoding"}
    plain, first, second = lengths.values()
    assert first > second > plain > 0

    command = [*browser_flags(tmp_path, width, scheme), f"--screenshot={shot}", f"file://{path}"]
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    pixels, colours = np.asarray(Image.open(shot).convert("RGB")), colours_of(scheme)
    assert pixels.shape == (1800, width, 3)
    assert near(pixels[:, :4], colours["paper"]).all()
    left, top, right, bottom = map(round, found["heading"])
    heading = pixels[top:bottom, left:right]
    assert near(heading, colours["paper"]).mean() > 0.5
    assert near(heading, colours["ink"]).mean() > 0.02
    check_bars(found["bars"], pixels, colours)


def test_the_schemes_have_other_colours_of_the_same_names():
    light, dark = colours_of("light"), colours_of("dark")
    assert light.keys() == dark.keys() >= {"paper", "ink", "plain", "c0", "c6"}
    assert all(light[name] != dark[name] for name in light)
    assert sum(light["paper"]) > sum(light["ink"])
    assert sum(dark["paper"]) < sum(dark["ink"])


def test_what_is_checked_of_a_drawing_would_be_seen():
    card = [0.0, 0.0, 100.0, 100.0]
    good = [["one", [5.0, 5.0, 50.0, 20.0], card], ["two", [5.0, 22.0, 95.0, 40.0], card]]
    check_texts(good)
    for wrong in ([5.0, 22.0, 105.0, 40.0], [30.0, 10.0, 60.0, 25.0]):
        with pytest.raises(AssertionError):
            check_texts([good[0], ["two", wrong, card]])
    colours = {"plain": (90, 90, 90), "c0": (0, 0, 200), "c1": (200, 0, 0)}
    names = {PLAIN: "plain", "d": "c0", LONG: "c1"}
    bars, pixels = [], np.full((100, 200, 3), 255, np.uint8)
    for number, (name, colour) in enumerate(names.items()):
        bars.append([(20.0, 10.0 + 30 * number, 120.0, 26.0 + 30 * number), f"{name}: 4.0", "Decoding"])
        pixels[10 + 30 * number : 26 + 30 * number, 20:120] = colours[colour]
    check_bars(bars, pixels, colours)
    for change in (slice(20, 120), slice(110, 120), slice(120, 125)):
        wrong = pixels.copy()
        wrong[40:56, change] = 255 if change.start < 120 else colours["c0"]
        with pytest.raises(AssertionError):
            check_bars(bars, wrong, colours)


def training_page(directory, entries):
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (directory / "metrics.jsonl").write_text(lines)
    record = SimpleNamespace(
        draft_section={"algorithm": "dflash", "init_from": None, "objective": {"weighting": {"gamma": 4.0}}},
        options={"lr": 0.001},
        target={"source": "t"},
    )
    return write_run_report(directory, record, [("steps", "20 of 60 (stopped by SIGINT)")]).read_text()


def training_entries():
    for step in range(0, 20, 2):
        accuracy = [1 / (label + 1) for label in range(11)]
        yield {"kind": "train", "step": step, "loss": 4.0 / (1 + step), "lr": 1e-3, "accuracy": accuracy, "mfu": None}
    yield {"kind": "eval", "step": 20, "accept_length": 3.25, "loss": 0.5}


def test_a_training_report_says_what_was_logged(tmp_path):
    page = training_page(tmp_path, training_entries())
    assert STYLE in page
    assert "dflash for t" in page
    assert re.findall(r"<h3>(.*?)</h3>", page) == ["loss", "accept length", "learning rate", "accuracy, training"]
    assert page.count("<polyline") == 2 + 1 + 1 + 11
    assert re.findall(r"label \d+", page[page.rindex('class="keys"') :]) == [f"label {n}" for n in range(1, 12)]
    shades = re.findall(r"--k: ([^\"]+)", page[page.rindex('class="keys"') :])
    assert len(set(shades)) == 11
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    for wanted in ("3.25", "held out, at step 20", "stopped by SIGINT", "objective.weighting.gamma"):
        assert wanted in text
    assert "None" not in text


def test_a_training_that_ended_before_its_first_entry_says_so(tmp_path):
    page = training_page(tmp_path, [])
    assert "ended before its first entry" in page
    assert "<svg" not in page


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_draws_a_training(tmp_path):
    page = training_page(tmp_path, training_entries())
    found = asked_of(page, LAID_OUT, tmp_path, width=600, scheme="dark")
    check_texts(found["texts"])
    assert found["wide"] <= 600
    assert "accept length" in found["shown"]
    assert "none" not in found["strokes"]
    assert len(set(found["strokes"][-11:])) == 11
