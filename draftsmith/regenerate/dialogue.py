"""One prompt's conversation while it is being answered."""

import hashlib
from typing import Any

from draftsmith.data.prompts import Prompt
from draftsmith.regenerate.answers import answer_record


class Dialogue:
    """Asks a prompt's turns one after the other, each after the earlier ones and their answers."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.finished = False
        self._finish_reason = "stop"
        self._answers: list[dict[str, str]] = []

    @property
    def turn(self) -> int:
        """Turns that are answered."""
        return len(self._answers)

    def ask(self) -> list[dict[str, str]]:
        """The messages up to and including the next question."""
        return self.prompt.question(self._answers)

    def answer(self, message: dict[str, str], finish_reason: str) -> None:
        """Takes the answer to the question last asked. How an answer that was cut off would have gone on is unknown, so
        no question follows it."""
        self._answers.append(message)
        self._finish_reason = finish_reason
        self.finished = self.turn == len(self.prompt.turns) or finish_reason == "length"

    def seed(self, seed: int) -> int:
        """The seed of the next answer, in [0, 2^63): the same however prompts are batched and a run is resumed."""
        digest = hashlib.sha256(f"{seed}/{self.turn}/{self.prompt.id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def record(self) -> dict[str, Any]:
        """The line of the output, as `answer_record`."""
        return answer_record(self.prompt, self.prompt.conversation(self._answers), self._finish_reason)
