"""The typed `bench` section of a recipe."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from draftsmith.data.options import SHIPPED_PROMPTS
from draftsmith.decoding.options import EngineOptions


def _several(value: Any) -> Any:
    """A single number stands for a list of one."""
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


BatchSizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_several), Field(min_length=1)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], BeforeValidator(_several), Field(min_length=1)]


class BenchOptions(BaseModel):
    """What is measured, and how.

    `prompts`: a JSONL file of prompts, `shipped` for the held-out ones that the package carries, or a data set by name
    (`gsm8k`, `math500`, `humaneval`, `mbpp`, `mt-bench`, `alpaca`; `NAME@FILE` reads rows in that data set's columns
    from a local JSONL file). `limit`: at most so many prompts (the first ones). `batch_size`: rows decoded side by
    side; a list measures each. `rows_waiting`: prompts that are handed to the engine together, as a multiple of the
    batch size; rows that end make room for those that wait. `seed`: of sampling; a list measures each.

    `repeats`: how often every round is timed by every decoder, in turn; the fastest of each counts. `warmup`: untimed
    rounds before that. `shown`: prompts whose text is shown in the report with the way that every token came; they are
    decoded once more, untimed, with the proposals recorded. `engine`: options of the engine, for all decoders (plain
    decoding takes those that concern it).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: str = SHIPPED_PROMPTS
    limit: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    seed: Seeds = (0,)
    batch_size: BatchSizes = (1,)
    rows_waiting: int = Field(default=1, ge=1)
    repeats: int = Field(default=1, ge=1)
    warmup: int = Field(default=1, ge=0)
    shown: int = Field(default=6, ge=0)
    engine: EngineOptions = EngineOptions()
