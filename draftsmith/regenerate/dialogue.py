"""One prompt's conversation while it is being answered."""

import hashlib
from collections.abc import Sequence
from typing import Any

from draftsmith.data.prompts import Prompt
from draftsmith.regenerate.answers import answer_record


class Dialogue:
    """Asks a prompt's turns one after the other, each after the earlier ones and their answers.

    tokens: of its answers so far; unrendered: how many of them the chat template does not give back from their text.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.finished = False
        self.tokens = self.unrendered = 0
        self._finish_reason = "stop"
        self._answers: list[dict[str, str]] = []
        self._answer_ids: list[Sequence[int]] | None = []

    @property
    def turn(self) -> int:
        """Turns that are answered."""
        return len(self._answers)

    def ask(self) -> list[dict[str, str]]:
        """The messages up to and including the next question."""
        return self.prompt.question(self._answers)

    def answer(self, message: dict[str, str], finish_reason: str, token_ids: Sequence[int] | None = None) -> None:
        """Takes the answer to the question last asked, and its tokens where they are known. How an answer that was cut
        off would have gone on is unknown, so no question follows it."""
        self._answers.append(message)
        if self._answer_ids is None or token_ids is None:
            self._answer_ids = None  # of one answer without them the tokens of the conversation are not known
        else:
            self._answer_ids.append(token_ids)
        self._finish_reason = finish_reason
        self.finished = self.turn == len(self.prompt.turns) or finish_reason == "length"

    def seed(self, seed: int) -> int:
        """The seed of the next answer, in [0, 2^63): the same however prompts are batched and a run is resumed."""
        digest = hashlib.sha256(f"{seed}/{self.turn}/{self.prompt.id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def record(self) -> dict[str, Any]:
        """The line of the output, as `answer_record`."""
        messages = self.prompt.conversation(self._answers)
        return answer_record(self.prompt, messages, self._finish_reason, self._answer_ids)
