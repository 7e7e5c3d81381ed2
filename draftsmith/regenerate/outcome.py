"""What became of prompts, whoever answered them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from draftsmith.regenerate.refusals import PromptRefused


class Outcome(NamedTuple):
    """What became of some prompts: the records of those that are answered, how many new tokens they took, those that
    are refused, and how many answers the chat template does not give back from their text."""

    records: list[dict[str, Any]]
    tokens: int
    refused: tuple[PromptRefused, ...] = ()
    unrendered: int = 0

    @classmethod
    def of_all(cls, outcomes: Sequence["Outcome"]) -> "Outcome":
        """That of all their prompts."""
        return cls(
            [record for one in outcomes for record in one.records],
            sum(one.tokens for one in outcomes),
            tuple(refused for one in outcomes for refused in one.refused),
            sum(one.unrendered for one in outcomes),
        )
