"""The typed options of the engine."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.base.switch import Switch


class EngineOptions(BaseModel):
    """How the engine works; none of these changes what it generates (in exact arithmetic).

    `graphs`: whether a step is replayed from a CUDA graph: "on", "off" (the same code, eagerly) or "auto" (on a GPU).
    `max_graphs`: how many graphs of steps are kept, and as many of passes over prompts; the longest unused goes first.
    `slots`: rows decoded side by side; others wait (None: as many as are waiting when the engine is idle).
    `batch_buckets`: a step computes the smallest of these numbers of slots that holds all rows in work (None: always
    all slots, so that a row's results never depend on when its neighbours end, to the last bit). `max_length`: tokens
    that a slot has room for, prompt and answer (None: what the waiting requests need; never more than the target's
    window). `steps_ahead`: steps that the device may be ahead of what the host has read (None: 1 on a GPU, 0 on a CPU).

    `prefill_chunk`: prompt tokens of a row that go through the target at a time; `prefill_rows`: rows that do so
    together (None: no limit); with 1, a row's results do not depend on its neighbours' prompts, to the last bit (in
    slots of one `max_length`: it bounds the padding of a prompt that nearly fills them).
    `context_bucket`: a step reads this many cache positions or a multiple of them (with graphs: a power of two times
    this many), so that its shapes seldom change. `num_proposals`: tokens proposed a block, at most what the draft's
    block has room for (None: all of them). `verify_width`: tokens in one target pass when decoding without a draft;
    with the width of a speculative run, bf16 results can be compared bit by bit. `proposer`: decoding options of the
    draft's own method, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    graphs: Switch = "auto"
    max_graphs: int = Field(default=32, ge=1)
    slots: int | None = Field(default=None, ge=1)
    batch_buckets: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(default=None, min_length=1)
    max_length: int | None = Field(default=None, ge=2)
    steps_ahead: int | None = Field(default=None, ge=0, le=8)
    prefill_chunk: int = Field(default=512, ge=1)
    prefill_rows: int | None = Field(default=None, ge=1)
    context_bucket: int = Field(default=256, ge=1)
    num_proposals: int | None = Field(default=None, ge=1)
    verify_width: int | None = Field(default=None, ge=1)
    proposer: dict[str, bool | int | float | str] = Field(default_factory=dict)
