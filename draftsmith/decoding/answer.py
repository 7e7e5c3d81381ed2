"""One prompt's answer in the making, as the host knows it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Literal

from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.state.report import FINISHED, INVALID_DRAFT, INVALID_TARGET, REPORT_HEADER, STOPPED


class Fault(StrEnum):
    """Whose numbers were not finite, so that a row has no answer."""

    TARGET = "target's logits"
    DRAFT = "draft's hidden states"


class Answer:
    """What `Engine.submit` gives for each prompt; it grows while the engine steps.

    index: the prompt's place in its request; prompt: its token ids; limit: the length, prompt included, at which it
    ends at the latest. token_ids, accept_lengths: as in `Generation`, so far; finish_reason: None while it goes on.
    Asynchronous iteration gives the tokens one by one, and steps the engine when there are none to give.
    """

    def __init__(self, request: Request, index: int, window: int, advance: Callable[[], None], dtype: object) -> None:
        self.index = index
        self.prompt = request.prompts[index]
        self.limit = min(len(self.prompt) + request.max_new_tokens, window)
        self.sampling: SamplingOptions = request.sampling
        self.stop_token_ids = request.stop_token_ids
        self.seed = request.seeds[index]
        self.token_ids: list[int] = []
        self.accept_lengths: list[int] = []
        self.finish_reason: Literal["stop", "length", "cancelled"] | None = None
        self.fault: Fault | None = None
        self._advance = advance
        self._dtype = dtype
        self._launched = 0
        self._most = 0

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.fault is not None

    @property
    def length(self) -> int:
        """Tokens that the row has, prompt included."""
        return len(self.prompt) + len(self.token_ids)

    # --- what the device may have done that the host has not read -----------------------------------------------------

    def launched(self, *, most: int) -> None:
        """Counts a launch that commits 1 to `most` tokens, or none if the row has ended by then."""
        self._launched += 1
        self._most += most

    def arrived(self, *, most: int) -> None:
        """Counts the report of such a launch."""
        self._launched -= 1
        self._most -= most

    @property
    def most_length(self) -> int:
        """The row's length at most, by now."""
        return min(self.length + self._most, self.limit)

    @property
    def surely_ended(self) -> bool:
        """Whether the row has ended by now, whatever was committed to it."""
        return self.finished or self.length + self._launched >= self.limit

    def read(self, report: list[int], *, verified: bool) -> None:
        """Takes in what a step did to the row: a line of `DecodingState.report`; verified: by a verify, and not by
        the prefill, which gives the first token."""
        _, committed, flags = report[:REPORT_HEADER]
        if flags & (INVALID_TARGET | INVALID_DRAFT):
            self.fault = Fault.TARGET if flags & INVALID_TARGET else Fault.DRAFT
            return
        self.token_ids += report[REPORT_HEADER : REPORT_HEADER + committed]
        if verified and committed:
            self.accept_lengths.append(committed)
        if flags & FINISHED:
            self.finish_reason = "stop" if flags & STOPPED else "length"

    def generation(self) -> Generation:
        """The result; raises `DraftsmithError` when it is not finished, or could not be."""
        if self.fault is not None:
            raise not_finite(self.fault, [self.index], self._dtype)
        if self.finish_reason is None or self.finish_reason == "cancelled":
            state = self.finish_reason or "not finished"
            raise DraftsmithError(f"the answer to prompt {self.index} is {state}; there is no result to give")
        return Generation(list(self.token_ids), list(self.accept_lengths), self.finish_reason)

    async def __aiter__(self) -> AsyncIterator[int]:
        given = 0
        while True:
            while given < len(self.token_ids):
                given += 1
                yield self.token_ids[given - 1]
            if self.fault is not None:
                raise not_finite(self.fault, [self.index], self._dtype)
            if self.finished:
                return
            self._advance()
            await asyncio.sleep(0)  # lets the readers of other answers have theirs


def not_finite(part: Fault, prompts: list[int], dtype: object) -> DraftsmithError:
    """The error for rows that met numbers which mean nothing."""
    return DraftsmithError(
        f"the {part} are NaN or infinite for prompts {prompts}; check the weights, or use a wider dtype than {dtype}"
    )
