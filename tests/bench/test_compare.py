"""Two benchmarks held against each other: what is paired with what, and what is called noise."""

import io
import random

import pytest

from draftsmith.bench.compare import compare
from draftsmith.errors import DraftsmithError
from draftsmith.stages.inspect import comparison_table
from tests.bench.made import PLAIN, answer, report, timed


def measured(gain: int = 0, seconds: float = 1.0, prompts: int = 12, noise: int = 0):
    """Prompts of very different accept lengths, `gain` higher and noisy by up to `noise`."""
    draw = random.Random(noise)
    answers, rounds = [], []
    for number in range(prompts):
        lengths = [1 + number % 5 + gain + draw.randint(-noise, noise) + 1 for _ in range(4)]
        answers.append(answer(f"p{number}", [max(1, n) for n in lengths]))
        rounds.append(timed(f"p{number}", 41, 0.1 + seconds * (1 + number % 3), index=number))
        rounds.append(timed(f"p{number}", 41, 0.1 + 2.0 * (1 + number % 3), PLAIN, index=number))
    return report(answers, rounds)


def rows(*arguments):
    return {row.figure: row for row in compare(*arguments).rows}


def test_a_small_gain_on_every_prompt_is_found_under_large_differences_between_prompts():
    found = rows(measured(), measured(gain=1, seconds=0.5))
    length = found["accept length"]
    assert length.change.value == pytest.approx(1.0)
    assert length.verdict == "higher"
    assert length.change.high - length.change.low < 1e-6
    # Unpaired, each figure alone is much less sure than the difference.
    speed = found["decode tokens/s"]
    assert (speed.change.value, speed.verdict, speed.units) == (pytest.approx(2.0), "higher", 12)
    assert found["plain decode tokens/s"].verdict.startswith("noise")
    assert found["decode speed-up over plain"].second == pytest.approx(4.0)
    assert rows(measured(gain=1), measured())["accept length"].verdict == "lower"


def test_a_difference_within_the_interval_is_noise():
    length = rows(measured(noise=1), measured(noise=2))["accept length"]
    assert length.change.low < 0 < length.change.high
    assert length.verdict.startswith("noise")
    assert rows(measured(prompts=2), measured(prompts=2, gain=1))["accept length"].verdict.startswith("too few")


def test_what_is_in_one_of_them_only_is_said():
    found = compare(measured(prompts=12), measured(prompts=9))
    assert found.rows[0].units == 9
    assert "3 prompts are in one of the two only; left out" in found.notes
    assert "1 prompt is in one of the two only; left out" in compare(measured(), measured(prompts=11)).notes
    other = report([answer("p1", [2, 3]), answer("p2", [4]), answer("p3", [4])], max_new_tokens=50, device="gpu")
    notes = compare(measured(), other).notes
    assert "max_new_tokens differs: 9 and 50" in notes
    assert "device differs: cpu and gpu" in notes


def asked_otherwise(found, ids):
    """The same benchmark, of other questions under some ids."""
    prompts = [p.model_copy(update={"turns": ("another",)}) if p.id in ids else p for p in found.prompts]
    return found.model_copy(update={"prompts": prompts})


def test_one_id_with_two_questions_is_not_one_prompt():
    found = compare(measured(), asked_otherwise(measured(gain=1), {"p0", "p7"}))
    assert [row.units for row in found.rows] == [10] * 4
    assert "2 ids have other questions in the two; left out" in found.notes
    other_category = [prompt.model_copy(update={"category": "words"}) for prompt in measured().prompts]
    assert compare(measured(), measured().model_copy(update={"prompts": other_category})).rows[0].units == 12
    with pytest.raises(DraftsmithError, match=r"no prompt in common \(12 ids are in both, with other questions\)"):
        compare(measured(), asked_otherwise(measured(), {prompt.id for prompt in measured().prompts}))


def test_what_cannot_be_compared():
    with pytest.raises(DraftsmithError, match="no prompt in common"):
        compare(measured(), report([answer("q", [2])]))
    with pytest.raises(DraftsmithError, match=r"the second benchmark has no draft 'x'; name one of d"):
        compare(measured(), measured(), None, "x")
    both = measured()
    several = both.model_copy(update={"decoders": [*both.decoders, both.decoders[1].model_copy(update={"name": "e"})]})
    with pytest.raises(DraftsmithError, match="the first benchmark measures several drafts; name one of d, e"):
        compare(several, both)
    alone = [answer("p1", [2], batch_size=4)]
    wide = report(alone, [timed("p1", 3, 1.0, batch_size=4), timed("p1", 3, 1.0, PLAIN, batch_size=4)])
    with pytest.raises(DraftsmithError, match=r"batch sizes \[1\], the second \[4\]"):
        compare(both, wide)


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_says_it_all(width):
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(comparison_table(compare(measured(), measured(gain=1, prompts=9))))
    shown = console.export_text()
    assert all(text in shown for text in ("accept", "1.00 (1.00 to 1.00)", "higher", "noise", "note: 3 prompts"))
    assert "…" not in shown
