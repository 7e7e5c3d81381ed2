"""An SGLang engine in a process of its own: what ends the engine ends that process, and the caller learns why.

Any fault of SGLang's scheduler kills the whole tree of the process that holds the `Engine`, with SIGKILL. Here that is
a child in a session of its own, whose output goes into a file; what it said last is in the error.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError

SHOWN_LINES = 12
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_END = 20.0

# A request's id and its token ids.
Job = list[tuple[str, list[int]]]


class EngineProcess:
    """A child that holds an engine and prefills what it is given.

    start: what makes the engine from its keywords, a function that can be pickled. Raises `DraftsmithError` where it
    dies, or says nothing for `timeout_seconds`, in starting or later.
    """

    def __init__(
        self, start: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any], timeout_seconds: float
    ) -> None:
        self.timeout_seconds = timeout_seconds
        descriptor, name = tempfile.mkstemp(prefix="draftsmith-sglang-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(start, dict(arguments), theirs, name), name="sglang")
        self._process.start()
        theirs.close()
        self._await("starting")

    def prefill(self, job: Job) -> None:
        """Have the engine prefill requests; returns when all are done."""
        try:
            self._connection.send(job)
        except OSError:  # the child is gone; what it said last says why
            raise self._died("between two batches") from None
        self._await(f"prefilling {len(job)} documents")

    def close(self) -> None:
        """End the engine and all its processes; the log of one that has not failed is removed."""
        with suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        self._process.join(SECONDS_TO_END)
        self._kill()
        self.log.unlink(missing_ok=True)

    def _await(self, doing: str) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        while not self._connection.poll(SECONDS_BETWEEN_LOOKS):
            if not self._process.is_alive() and not self._connection.poll():
                raise self._died(doing)
            if time.monotonic() > deadline:
                self._kill()
                raise DraftsmithError(
                    f"SGLang's engine, {doing}, has said nothing for {self.timeout_seconds:g} s (capture.sglang."
                    f"timeout_seconds) and was ended. {self._last_words()}"
                )
        try:
            self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(doing) from None

    def _died(self, doing: str) -> DraftsmithError:
        self._process.join(SECONDS_TO_END)
        self._kill()
        return DraftsmithError(
            f"SGLang's engine ended while {doing} (exit status {self._process.exitcode}). {self._last_words()}"
        )

    def _kill(self) -> None:
        """Ends what is left of the child's session: its own children are in it."""
        pid = self._process.pid
        assert pid is not None
        self._process.kill()  # before it had a session, it has no children either
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._process.join(SECONDS_TO_END)

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        shown = "\n".join(f"  {line}" for line in telling_lines(lines))
        return f"What is finished is kept. Its log is {self.log}, and ends with\n{shown}"


def telling_lines(lines: Sequence[str]) -> Sequence[str]:
    """The end of a log, from its last traceback's error on where there is one: what follows that is other processes'
    ending."""
    starts = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    for start in reversed(starts):
        for i in range(start + 1, len(lines)):
            if not lines[i].startswith(" "):  # the line with the exception's class and text
                return lines[i : i + SHOWN_LINES]
    return lines[-SHOWN_LINES:]


def start_sglang(arguments: Mapping[str, Any]) -> Any:
    """An `sglang.Engine`; runs in the child."""
    import sglang  # type: ignore[import-not-found, unused-ignore]

    return sglang.Engine(**arguments)


def _serve(
    start: Callable[[Mapping[str, Any]], Any], arguments: dict[str, Any], connection: Connection, log: str
) -> None:
    """The child: an engine that prefills until it is told to end, or its parent is gone."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    engine = start(arguments)
    connection.send("up")
    while True:
        try:
            job: Job | None = connection.recv()
        except EOFError:
            job = None
        if job is None:
            break
        engine.generate(
            rid=[request_id for request_id, _ in job],
            input_ids=[ids for _, ids in job],
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
        )
        connection.send("done")
    engine.shutdown()
