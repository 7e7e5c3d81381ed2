"""What a user asks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """`turns`, each to be answered after the earlier ones and their answers.

    id: unique in its file; category: the kind of question, for reports; system: the conversation's own system message.
    """

    id: str
    turns: tuple[str, ...]
    category: str | None = None
    system: str | None = None
