"""An OpenAI-compatible server that answers in place of the local engine."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from draftsmith.base.http import JsonServer, NoAnswer, NotJson, Refused
from draftsmith.errors import DraftsmithError
from draftsmith.regenerate.options import EndpointOptions, RegenerateOptions
from draftsmith.regenerate.refusals import PromptRefused

# Statuses that are about this one request, and 500, which some servers give for a request that they cannot handle.
# Others (401, 403, 404, ...) mean that no request will be answered.
OF_THE_REQUEST = frozenset({400, 413, 422, 500})
FINISHED = ("stop", "length")

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ChatAnswer:
    """message: role, content and perhaps reasoning_content; finish_reason: "stop" or "length"; tokens: as the server
    counts them, 0 where it does not say; token_ids: the generated tokens with their stop token, None where the server
    does not return them."""

    message: dict[str, str]
    finish_reason: str
    tokens: int
    token_ids: list[int] | None = None


def request_fields(options: RegenerateOptions) -> dict[str, Any]:
    """Every field by which vLLM and SGLang sample, none left to the server, and that answers come whole: with their
    token ids, and with the special tokens by which some models structure them.

    Where a request is silent, these servers take what the target's `generation_config.json` says (a repetition penalty
    of 1.1, top_k 20), and greedy answers are then not the target's. A top_k of -1 is off for both; SGLang refuses 0.
    """
    fields = {
        "n": 1,
        "max_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    left_out = () if options.endpoint is None else options.endpoint.leave_out
    return {name: value for name, value in fields.items() if name not in left_out}


class ChatEndpoint:
    """Chat completions of one server. Safe to use from several threads; a context that closes its connections."""

    def __init__(self, options: EndpointOptions) -> None:
        self.options = options
        key = os.environ.get(options.api_key_env)
        self._server = JsonServer(
            options.base_url,
            connections=options.concurrency,
            timeout_seconds=options.timeout_seconds,
            retries=options.retries,
            backoff_seconds=options.backoff_seconds,
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )
        self.url = self._server.base_url + "/chat/completions"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    def chat(self, messages: list[dict[str, str]], settings: dict[str, Any], *, prompt_id: str) -> ChatAnswer:
        """One answer; `settings` go into the request as they are, `prompt_id` names it in errors.

        Passing faults (no connection, time-outs, overload) are retried with doubling waits. Raises `PromptRefused`
        where this prompt has no answer that can be trained on, and the next one may have; `DraftsmithError` where the
        server gives no answers at all.
        """
        about = f"prompt {prompt_id!r}"
        try:
            reply = self._server.post(
                "/chat/completions", {"model": self.options.model, "messages": messages, **settings}
            )
        except NoAnswer as error:
            raise DraftsmithError(
                f"{about}: {self.url} {error}; see that the server is up, then run again to go on with what is missing "
                "(regenerate.endpoint.retries sets the tries)"
            ) from error
        except Refused as error:
            if error.status in OF_THE_REQUEST:
                raise PromptRefused(prompt_id, f"{self.url} refuses the request with {error}") from error
            raise DraftsmithError(f"{self.url} refuses the request with {error}") from error
        except NotJson as error:
            raise DraftsmithError(f"{about}: the reply of {self.url} is not a chat completion: {error}") from error
        return self._parse(reply, prompt_id)

    def _parse(self, reply: Any, prompt_id: str) -> ChatAnswer:
        try:
            choice = reply["choices"][0]
            message, finish_reason = choice["message"], choice["finish_reason"]
            answer = {"role": "assistant", "content": message["content"] or ""}
            # vLLM's name, and the one that it had before, which others still use.
            reasoning = message.get("reasoning") or message.get("reasoning_content")
            tokens = int((reply.get("usage") or {}).get("completion_tokens") or 0)
            returned = choice.get("token_ids")
            token_ids = None if returned is None else [int(token) for token in returned]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise DraftsmithError(
                f"prompt {prompt_id!r}: the reply of {self.url} is not a chat completion ({error!r}): "
                f"{str(reply)[:200]}"
            ) from error
        if reasoning:
            answer["reasoning_content"] = reasoning
        if finish_reason not in FINISHED:
            raise PromptRefused(
                prompt_id,
                f"{self.url} ended the answer with {finish_reason!r}; only {' and '.join(FINISHED)} can be trained on",
            )
        if not answer["content"].strip() and not (reasoning or "").strip():
            raise PromptRefused(prompt_id, f"{self.url} gave an empty answer ({message['content']!r})")
        return ChatAnswer(answer, finish_reason, tokens, token_ids)


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
