"""SIGTERM and SIGINT ask for a stop: the running step is finished and saved first."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """Within its `with` block, the first SIGTERM or SIGINT only sets `signal_name`; a second one acts as usual, unless
    it comes within `relayed_within` seconds of the first.

    That is how the first one comes again: a terminal and a batch system send a signal to every process, and a launcher
    among them passes it on to those that it has started.
    Python delivers signals to the main thread, and only it may install handlers; elsewhere the request never comes.
    """

    def __init__(self, relayed_within: float = 2.0) -> None:
        self.signal_name: str | None = None
        self._relayed_within = relayed_within
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name, self._first = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._first > self._relayed_within:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
