"""What a user asks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]
"""What prompts are for: to learn from, or to measure on."""


@dataclass(frozen=True)
class Prompt:
    """`turns`, each to be answered after the earlier ones and their answers.

    id: unique in its file; category: the kind of question, for reports; system: the conversation's own system message.
    """

    id: str
    turns: tuple[str, ...]
    category: str | None = None
    system: str | None = None

    def conversation(self, answers: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """The messages up to the last of `answers`: the assistant's messages to the first turns, one each."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answer in zip(self.turns, answers, strict=False):
            messages += [{"role": "user", "content": question}, dict(answer)]
        return messages

    def question(self, answers: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """The messages up to the question that follows `answers`."""
        return [*self.conversation(answers), {"role": "user", "content": self.turns[len(answers)]}]


def answer_message(text: str) -> dict[str, str]:
    """What the assistant said, as a message."""
    return {"role": "assistant", "content": text}
