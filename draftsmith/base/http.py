"""JSON over HTTP with one server: tries again what may pass, and tells apart what may not."""

import json
import logging
import random
import time
from types import TracebackType
from typing import Any, Self

import httpx2

from draftsmith.errors import DraftsmithError

_log = logging.getLogger(__name__)

# A server that is up may answer these another time.
BUSY_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
LONGEST_WAIT_SECONDS = 60.0
SECONDS_BETWEEN_NOTICES = 10.0


class NoAnswer(Exception):
    """No reply, or only busy ones, however often the server was asked."""


class Refused(Exception):
    """The server answered with another status than success, and means it."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"HTTP {status}: {detail}")
        self.status = status


class NotJson(Exception):
    """A reply with success that is no JSON."""


class JsonServer:
    """One server below `base_url`. Safe to use from several threads; close it, or use it as a context.

    connections: the most requests under way at a time; timeout_seconds: the longest wait for one whole reply; retries:
    further tries of a request that met a passing fault (no connection, a time-out, an overloaded or failing server),
    with waits that double from `backoff_seconds` up to a minute; a wait that the server names counts instead.
    """

    def __init__(
        self,
        base_url: str,
        *,
        connections: int,
        timeout_seconds: float,
        retries: int = 0,
        backoff_seconds: float = 1.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        try:
            self.base_url = str(httpx2.URL(base_url)).rstrip("/")
        except httpx2.InvalidURL as error:
            raise DraftsmithError(
                f"{base_url!r} is no address ({error}); give one such as http://host:8000/v1"
            ) from error
        self.timeout_seconds = timeout_seconds
        self.retries = retries
        self.backoff_seconds = backoff_seconds
        self._next_notice = 0.0
        self._client = httpx2.Client(
            headers=headers, timeout=timeout_seconds, limits=httpx2.Limits(max_connections=connections)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def get(self, path: str) -> Any:
        """The JSON at `path`; raises as `post`."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        """The JSON reply to a JSON body. Raises `NoAnswer`, `Refused` or `NotJson`."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any) -> Any:
        url = self.base_url + path
        for attempt in range(self.retries + 1):
            try:
                reply = self._exchange(method, url, body)
            except _Passing as fault:
                if attempt == self.retries:
                    if fault.status is not None and fault.status not in BUSY_STATUSES:
                        raise Refused(fault.status, fault.reason) from fault
                    raise NoAnswer(f"failed {attempt + 1} times, at last with {fault}") from fault
                wait = fault.retry_after or self.backoff_seconds * 2**attempt * random.uniform(0.5, 1.0)
                wait = min(wait, LONGEST_WAIT_SECONDS)
                self._notice(f"{url}: {fault}; try {attempt + 2} of {self.retries + 1} in {wait:.0f} s")
                time.sleep(wait)
            else:
                try:
                    return json.loads(reply)
                except ValueError as error:
                    raise NotJson(f"{reply[:200]!r}") from error
        raise AssertionError("the last attempt returns or raises")

    def _exchange(self, method: str, url: str, body: Any) -> bytes:
        deadline = time.monotonic() + self.timeout_seconds
        received = bytearray()
        try:
            with self._client.stream(method, url, json=body) as reply:
                for chunk in reply.iter_bytes():
                    received += chunk
                    if time.monotonic() > deadline:  # the client's own limit is for each read
                        raise _Passing(f"no whole reply within {self.timeout_seconds:g} s")
        except httpx2.RequestError as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        if reply.is_success:
            return bytes(received)
        detail = received[:300].decode("utf-8", errors="replace")
        if reply.status_code in BUSY_STATUSES or reply.status_code >= 500:
            raise _Passing(detail, reply.status_code, reply.headers.get("Retry-After"))
        raise Refused(reply.status_code, detail)

    def _notice(self, text: str) -> None:
        """A line for the user, of many at a time only one."""
        now = time.monotonic()
        if now >= self._next_notice:
            self._next_notice = now + SECONDS_BETWEEN_NOTICES
            _log.warning("%s", text)


class _Passing(Exception):
    """A fault that another try may not meet; `status` where the server answered, `retry_after` in seconds where it
    names it."""

    def __init__(self, reason: str, status: int | None = None, retry_after: str | None = None) -> None:
        super().__init__(reason if status is None else f"HTTP {status}: {reason}")
        self.reason = reason
        self.status = status
        self.retry_after = float(retry_after) if retry_after and retry_after.isdigit() else None
