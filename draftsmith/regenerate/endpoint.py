"""An OpenAI-compatible server that answers in place of the local engine."""

import http.client
import json
import logging
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.errors import DraftsmithError

_log = logging.getLogger(__name__)

# The server may answer these another time; every other 4xx is a fault of the request.
RETRIED_STATUSES = {408, 425, 429, 500, 502, 503, 504}
LONGEST_WAIT_SECONDS = 60.0

Item = TypeVar("Item")
Result = TypeVar("Result")


class EndpointOptions(BaseModel):
    """Which server to ask, and how persistently."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str = Field(pattern=r"^https?://", description="Up to and including /v1.")
    model: str = Field(description="The name under which the server serves the target.")
    api_key_env: str = Field(
        default="OPENAI_API_KEY", description="The environment variable with the API key; unset: none is sent."
    )
    concurrency: int = Field(default=16, ge=1, description="The most conversations under way at a time.")
    retries: int = Field(default=5, ge=0, description="Further tries of a request that met a passing fault.")
    backoff_seconds: float = Field(default=1.0, gt=0.0, description="The first wait; each next one is twice as long.")
    timeout_seconds: float = Field(default=600.0, gt=0.0, description="The longest wait for one answer.")


@dataclass(frozen=True)
class ChatAnswer:
    """message: role, content and perhaps reasoning_content; finish_reason: "stop" or "length"; tokens: as the server
    counts them, 0 where it does not say."""

    message: dict[str, str]
    finish_reason: str
    tokens: int


class ChatEndpoint:
    """Chat completions of one server. Safe to use from several threads."""

    def __init__(self, options: EndpointOptions) -> None:
        self.options = options
        self.url = options.base_url.rstrip("/") + "/chat/completions"
        self._headers = {"Content-Type": "application/json"}
        key = os.environ.get(options.api_key_env)
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def chat(self, messages: list[dict[str, str]], settings: dict[str, Any], *, about: str) -> ChatAnswer:
        """One answer; `settings` go into the request as they are, `about` names the request in errors.

        Passing faults (no connection, time-outs, overload) are retried with doubling waits. DraftsmithError: they last,
        the server refuses the request, or its reply is no chat completion.
        """
        body = json.dumps({"model": self.options.model, "messages": messages, **settings}).encode()
        for attempt in range(self.options.retries + 1):
            try:
                reply = self._post(body)
            except _PassingFault as fault:
                if attempt == self.options.retries:
                    raise DraftsmithError(
                        f"{about}: {self.url} failed {attempt + 1} times, at last with {fault}; see that the server is "
                        "up, then run again to go on with what is missing (regenerate.endpoint.retries sets the tries)"
                    ) from fault
                wait = fault.retry_after or self.options.backoff_seconds * 2**attempt * random.uniform(0.5, 1.0)
                _log.debug("%s: %s; next try in %.1f s", about, fault, wait)
                time.sleep(min(wait, LONGEST_WAIT_SECONDS))
            else:
                return self._parse(reply, about)
        raise AssertionError("the last attempt returns or raises")

    def _post(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, data=body, headers=self._headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self.options.timeout_seconds) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read().decode("utf-8", errors="replace")[:300]
            if error.code in RETRIED_STATUSES:
                raise _PassingFault(f"HTTP {error.code}: {detail}", error.headers.get("Retry-After")) from error
            raise DraftsmithError(f"{self.url} refuses the request with HTTP {error.code}: {detail}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _PassingFault(f"{type(error).__name__}: {error}") from error

    def _parse(self, reply: bytes, about: str) -> ChatAnswer:
        try:
            parsed = json.loads(reply)
            choice = parsed["choices"][0]
            message, finish_reason = choice["message"], choice["finish_reason"]
            answer = {"role": "assistant", "content": message["content"] or ""}
            tokens = int((parsed.get("usage") or {}).get("completion_tokens") or 0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise DraftsmithError(
                f"{about}: the reply of {self.url} is not a chat completion ({error!r}): {reply[:200]!r}"
            ) from error
        if message.get("reasoning_content"):
            answer["reasoning_content"] = message["reasoning_content"]
        if finish_reason not in ("stop", "length"):
            raise DraftsmithError(
                f"{about}: {self.url} ended the answer with {finish_reason!r}; only stop and length can be trained on"
            )
        return ChatAnswer(answer, finish_reason, tokens)


class _PassingFault(Exception):
    """A fault that another try may not meet; `retry_after` in seconds, where the server names it."""

    def __init__(self, reason: str, retry_after: str | None = None) -> None:
        super().__init__(reason)
        self.retry_after = float(retry_after) if retry_after and retry_after.isdigit() else None


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item], concurrency: int) -> Iterator[Result]:
    """`work` of every item, at most `concurrency` at a time, as each is done.

    After a failure nothing new is begun; what is under way is still yielded before the failure is raised.
    """
    pool = ThreadPoolExecutor(max_workers=concurrency)
    futures = [pool.submit(work, item) for item in items]
    failure: BaseException | None = None
    try:
        for future in as_completed(futures):
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                yield future.result()
            elif failure is None:
                failure = error
                for other in futures:
                    other.cancel()
        if failure is not None:
            raise failure
    finally:
        pool.shutdown(cancel_futures=True)
