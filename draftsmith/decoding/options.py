"""The typed options of the engine."""

from pydantic import BaseModel, ConfigDict, Field


class EngineOptions(BaseModel):
    """How the engine works; none of these changes what it generates (in exact arithmetic).

    `prefill_chunk`: prompt tokens of a row that go through the target at a time. `context_bucket`: a step reads this
    many cache positions or a multiple of them, so that its shapes seldom change. `num_proposals`: tokens proposed a
    block, at most what the draft's block has room for (None: all of them). `verify_width`: tokens in one target pass
    when decoding without a draft; with the width of a speculative run, bf16 results can be compared bit by bit.
    `proposer`: decoding options of the draft's own method, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill_chunk: int = Field(default=512, ge=1)
    context_bucket: int = Field(default=256, ge=1)
    num_proposals: int | None = Field(default=None, ge=1)
    verify_width: int | None = Field(default=None, ge=1)
    proposer: dict[str, bool | int | float | str] = Field(default_factory=dict)
