"""Progress on a console: lines in a log, bars in a terminal."""

import io
import logging

import pytest
from rich.console import Console

from draftsmith.cli.console import ConsoleProgress, format_count, format_duration, start_console


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=160, force_interactive=terminal), out


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3661, "1:01:01")])
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(3, "3"), (0.25, "0.2"), (12.4, "12"), (12345, "12,345")])
def test_counts(number, text):
    assert format_count(number) == text


def test_a_log_gets_the_final_state_of_a_stage():
    target, out = console(terminal=False)
    with ConsoleProgress(target).stage("Capture", total=300, unit="tokens") as stage:
        stage.advance(100)
        stage.advance(150, loss="2.5")
    assert "Capture: 250/300 tokens" in out.getvalue()
    assert "loss 2.5" in out.getvalue()


def test_a_terminal_shows_nested_stages_and_is_left_clean():
    target, out = console(terminal=True)
    progress = ConsoleProgress(target)
    with progress.stage("Train", total=2, unit="steps") as outer:
        outer.advance()
        with progress.stage("Evaluate", total=None, unit="rows") as inner:
            inner.advance(3)
        outer.advance(accept="1.9")
    assert "Train" in out.getvalue()
    assert "2/2 steps" in out.getvalue()
    assert "3 rows" in out.getvalue()
    assert "accept 1.9" in out.getvalue()
    with progress.stage("Again", total=1, unit="steps") as stage:  # a later stage starts afresh
        stage.advance()
    assert "1/1 steps" in out.getvalue()


def test_a_stage_that_fails_closes_its_bar():
    target, _ = console(terminal=True)
    progress = ConsoleProgress(target)
    with pytest.raises(KeyboardInterrupt), progress.stage("Train", total=2, unit="steps"):
        raise KeyboardInterrupt
    with progress.stage("Again", total=1, unit="steps") as stage:
        stage.advance()


def test_messages_are_whole_lines_in_a_log_file(capsys):
    start_console()
    path = "/somewhere/" + "deep/" * 40 + "[bold]features"
    logging.getLogger("draftsmith.capture").warning("%s is full", path)
    assert capsys.readouterr().err == f"warning: {path} is full\n"
