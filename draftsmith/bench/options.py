"""The typed `bench` section of a recipe."""

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.data.options import SHIPPED_PROMPTS


class BenchOptions(BaseModel):
    """What is measured, and how.

    `prompts`: a JSONL file of prompts, or `shipped` for the held-out ones that the package carries.
    `limit`: at most so many prompts (the first ones of the file). `batch_size`: prompts decoded together. `repeats`:
    how often each batch is timed, plainly and speculatively in turn; the fastest of each counts. `warmup`: untimed
    rounds over the first batch before that.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: str = SHIPPED_PROMPTS
    limit: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    batch_size: int = Field(default=1, ge=1)
    repeats: int = Field(default=1, ge=1)
    warmup: int = Field(default=1, ge=0)
