"""One prompt's answer in the making, as the host knows it, and what a step adds to it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.state.report import FINISHED, INVALID_DRAFT, INVALID_TARGET, REPORT_HEADER, STOPPED

FinishReason = Literal["stop", "length", "cancelled"]


class Fault(StrEnum):
    """Whose numbers were not finite, so that a row has no answer."""

    TARGET = "target's logits"
    DRAFT = "draft's hidden states"


class Answer:
    """What `Engine.submit` gives for each prompt; it grows while the engine steps.

    index: the prompt's place in its request; prompt: its token ids; limit: the length, prompt included, at which it
    ends at the latest. token_ids, accept_lengths: as in `Generation`, so far; finish_reason: None while it goes on.
    """

    def __init__(self, request: Request, index: int, window: int) -> None:
        """window: tokens that the target's window has room for."""
        self.index = index
        self.prompt = request.prompts[index]
        self.limit = min(len(self.prompt) + request.max_new_tokens, window)
        self.sampling: SamplingOptions = request.sampling
        self.stop_token_ids = request.stop_token_ids
        self.seed = request.seeds[index]
        self.token_ids: list[int] = []
        self.accept_lengths: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.fault: Fault | None = None
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

    def read(self, report: list[int], *, verified: bool) -> "Delta":
        """Takes in what a step did to the row: a line of `DecodingState.report`; verified: by a verify, and not by
        the prefill, which gives the first token."""
        _, committed, flags = report[:REPORT_HEADER]
        if flags & (INVALID_TARGET | INVALID_DRAFT):
            self.fault = Fault.TARGET if flags & INVALID_TARGET else Fault.DRAFT
            return Delta(self, (), None, self.fault)
        token_ids = tuple(report[REPORT_HEADER : REPORT_HEADER + committed])
        self.token_ids += token_ids
        if verified and committed:
            self.accept_lengths.append(committed)
        if flags & FINISHED:
            self.finish_reason = "stop" if flags & STOPPED else "length"
        return Delta(self, token_ids, self.finish_reason, None)

    def generation(self) -> Generation:
        """The result; raises `DraftsmithError` when it is not finished, or could not be."""
        raise_fault([self])
        if self.finish_reason is None or self.finish_reason == "cancelled":
            state = self.finish_reason or "not finished"
            raise DraftsmithError(f"the answer to prompt {self.index} is {state}; there is no result to give")
        return Generation(list(self.token_ids), list(self.accept_lengths), self.finish_reason)


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer: token_ids, perhaps none; and, with the last of them, why the answer is
    finished, or whose fault it is that there is none."""

    answer: Answer
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    fault: Fault | None

    @property
    def last(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.fault is not None


def raise_fault(answers: Iterable[Answer]) -> None:
    """Raises `DraftsmithError` where some answers met numbers which mean nothing; the target's fault comes first."""
    faults = {answer.index: answer.fault for answer in answers if answer.fault is not None}
    for part in Fault:
        prompts = [index for index, fault in faults.items() if fault is part]
        if prompts:
            raise DraftsmithError(
                f"the {part} are NaN or infinite for prompts {prompts}; check the weights, or use a wider dtype"
            )
