"""The typed `bench` section of a recipe."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from draftsmith.base.fields import PlaceField
from draftsmith.data.options import SHIPPED_PROMPTS
from draftsmith.decoding.options import SamplingFields


def _several(value: Any) -> Any:
    """A single number stands for a list of one."""
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


BatchSizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_several), Field(min_length=1)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], BeforeValidator(_several), Field(min_length=1)]


class BenchOptions(SamplingFields):
    """The recipe's `bench` section: what is measured, and how. (How the engine works is the section `engine`.)"""

    prompts: PlaceField = SHIPPED_PROMPTS
    """A JSONL file of prompts, `shipped` for the held-out ones that the package carries, or a data set by name
    (`gsm8k`, `math500`, `humaneval`, `mbpp`, `mt-bench`, `alpaca`; `NAME@FILE` reads rows in that data set's columns
    from a local JSONL file)."""
    limit: int | None = Field(default=None, ge=1)
    """The most prompts to ask (the first ones). Left out: all."""
    max_new_tokens: int = Field(default=128, ge=1)
    """The most tokens of one answer."""
    seed: Seeds = (0,)
    """Of sampling; a list measures each."""
    batch_size: BatchSizes = (1,)
    """Rows decoded side by side; a list measures each."""
    rows_waiting: int = Field(default=1, ge=1)
    """Prompts that are handed to the engine together, as a multiple of the batch size; rows that end make room for
    those that wait."""
    repeats: int = Field(default=1, ge=1)
    """How often every round is timed by every decoder, in turn; the fastest of each counts."""
    warmup: int = Field(default=1, ge=0)
    """Untimed rounds before that."""
    shown: int = Field(default=6, ge=0)
    """Prompts whose text is shown in the report with the way that every token came; they are decoded once more,
    untimed, with the proposals recorded."""

    @model_validator(mode="before")
    @classmethod
    def _engine_has_moved(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "engine" in fields:
            raise ValueError(
                "`bench.engine` is now the section `engine` at the top of the recipe, which every command that decodes "
                "reads: move it there"
            )
        return fields
