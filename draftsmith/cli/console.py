"""Progress on the console: a Rich bar with an ETA in a terminal, a plain line now and then in a log."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from draftsmith.base.progress import Progress as ProgressReport
from draftsmith.base.progress import SilentProgress, Stage
from draftsmith.parallel.ranks import is_first

LOG_INTERVAL_SECONDS = 15.0


def format_duration(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def format_count(number: float) -> str:
    """A count with thousands separators; small fractions keep one digit."""
    return f"{number:,.1f}" if abs(number) < 10 and number != int(number) else f"{round(number):,}"


class _StateColumn(ProgressColumn):
    """`1,200/5,000 tokens  310/s  0:12 left`."""

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        done = format_count(task.completed)
        amount = f"{done} {unit}" if task.total is None else f"{done}/{format_count(task.total)} {unit}"
        rate = task.finished_speed or task.speed
        parts = [amount] if rate is None else [amount, f"{format_count(rate)}/s"]
        if task.finished or task.total is None:
            parts.append(format_duration(task.elapsed or 0.0))
        elif task.time_remaining is not None:
            parts.append(f"{format_duration(task.time_remaining)} left")
        parts += [f"{name} {value}" for name, value in task.fields["shown"].items()]
        return Text("  ".join(parts))


class _BarStage:
    """A stage drawn as a bar."""

    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task
        self._shown: dict[str, str] = {}

    def advance(self, amount: float = 1.0, **fields: str) -> None:
        self._shown.update(fields)
        self._bars.update(self._task, advance=amount, shown=dict(self._shown))


class _LogStage:
    """A stage written as lines, at most one every `LOG_INTERVAL_SECONDS`."""

    def __init__(self, console: Console, name: str, total: float | None, unit: str) -> None:
        self._console, self._name, self._total, self._unit = console, name, total, unit
        self._done = 0.0
        self._shown: dict[str, str] = {}
        self._started = self._last = time.monotonic()
        self._news = True

    def advance(self, amount: float = 1.0, **fields: str) -> None:
        self._done += amount
        self._shown.update(fields)
        self._news = True
        if time.monotonic() - self._last >= LOG_INTERVAL_SECONDS:
            self.write()

    def write(self) -> None:
        """A line, unless the last one said the same."""
        if not self._news:
            return
        self._last, self._news = time.monotonic(), False
        elapsed = time.monotonic() - self._started
        done = format_count(self._done)
        parts = [f"{done}/{format_count(self._total)} {self._unit}" if self._total else f"{done} {self._unit}"]
        parts.append(format_duration(elapsed))
        if self._total and 0 < self._done < self._total:
            parts.append(f"{format_duration(elapsed * (self._total - self._done) / self._done)} left")
        parts += [f"{name} {value}" for name, value in self._shown.items()]
        self._console.print(f"{self._name}: " + "  ".join(parts), highlight=False, markup=False)


class ConsoleProgress:
    """Draws the stages of `draftsmith.base.progress` on a Rich console (standard error unless another is given).

    A stage opened while another runs is drawn below it. In a terminal each stage is a bar; elsewhere (a log file, CI)
    it is a line every 15 seconds and one at its end.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars: Progress | None = None
        self._open = 0

    @contextmanager
    def stage(self, name: str, total: float | None, unit: str) -> Iterator[Stage]:
        if not self._console.is_terminal:
            line = _LogStage(self._console, name, total, unit)
            try:
                yield line
            finally:
                line.write()
            return
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=30), _StateColumn(), console=self._console
            )
            self._bars.start()
        self._open += 1
        task = self._bars.add_task(name, total=total, unit=unit, shown={})
        try:
            yield _BarStage(self._bars, task)
        finally:
            self._bars.stop_task(task)
            self._open -= 1
            if self._open == 0:
                self._bars.stop()
                self._bars = None


class _LineHandler(logging.Handler):
    """Log messages as lines that are not wrapped, so that paths in a log file stay whole."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.levelname.lower()}: {record.getMessage()}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def start_console() -> ProgressReport:
    """Sends draftsmith's log messages to standard error, in a terminal above the bars, and returns the progress to
    report to.

    Of several processes that a launcher started, only the first one draws.
    """
    if not is_first():
        return SilentProgress()
    disable_progress_bar()  # transformers' own bars would run into these
    console = Console(stderr=True)
    drawn = console.is_terminal
    handler = RichHandler(console=console, show_time=False, show_path=False) if drawn else _LineHandler(console)
    logger = logging.getLogger("draftsmith")
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]
    return ConsoleProgress(console)
