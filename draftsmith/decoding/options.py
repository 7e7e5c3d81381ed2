"""The typed options of decoding: the recipe's `engine` section, and how tokens are chosen."""

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from draftsmith.base.switch import Switch


class EngineOptions(BaseModel):
    """The recipe's `engine` section: how the engine works, wherever it does (`generate`, `regenerate`, `bench`, `tune`,
    and evaluation in training). None of it changes what is generated (in exact arithmetic)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    graphs: Switch = "auto"
    """Whether a step is replayed from a CUDA graph: on, off (the same code, eagerly) or auto (on a GPU)."""
    max_graphs: int = Field(default=32, ge=1)
    """How many graphs of steps are kept, and as many of passes over prompts; the longest unused goes first."""
    slots: int | None = Field(default=None, ge=1)
    """Rows decoded side by side; others wait. Left out: as many as are waiting when the engine is idle. `bench` and
    `regenerate` have as many as their `batch_size`."""
    batch_buckets: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(default=None, min_length=1)
    """A step computes the smallest of these numbers of slots that holds all rows in work. Left out: always all slots,
    so that a row's results never depend on when its neighbours end, to the last bit."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens that a slot has room for, prompt and answer. Left out: what the waiting requests need; never more than the
    target's window."""
    steps_ahead: int | None = Field(default=None, ge=0, le=8)
    """Steps that the device may be ahead of what the host has read. Left out: 1 on a GPU, 0 on a CPU."""
    prefill_chunk: int = Field(default=512, ge=1)
    """Prompt tokens of a row that go through the target at a time."""
    prefill_rows: int | None = Field(default=None, ge=1)
    """Rows whose prompts are read together. Left out: no limit. With 1, a row's results do not depend on its
    neighbours' prompts, to the last bit (in slots of one `max_length`: it bounds the padding of a prompt that nearly
    fills them)."""
    context_bucket: int = Field(default=256, ge=1)
    """A step reads this many cache positions or a multiple of them (with graphs: a power of two times this many), so
    that its shapes seldom change."""
    num_proposals: int | None = Field(default=None, ge=1)
    """Tokens proposed a step, at most what the draft has room for. Left out: all of them."""
    verify_width: int | None = Field(default=None, ge=1)
    """Tokens in one target pass when decoding without a draft; with the width of a speculative run, bf16 results can be
    compared bit by bit."""
    proposer: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Decoding options of the draft's own method, by name."""

    def without_draft(self) -> "EngineOptions":
        """The options that also concern decoding without a draft."""
        return self.model_copy(update={"num_proposals": None, "proposer": {}})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _temperature(value: Any) -> float:
    if not _is_number(value) or not 0.0 <= value < math.inf:
        raise ValueError("it needs a number >= 0 (0 is greedy)")
    return float(value)


def _top_p(value: Any) -> float:
    if not _is_number(value) or not 0.0 < value <= 1.0:
        raise ValueError("it needs a number in (0, 1] (1 is off)")
    return float(value)


def _top_k(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError("it needs an integer from 0 (off) to 2^63 - 1")
    return value


class SamplingFields(BaseModel):
    """How tokens are chosen: by temperature, then top-k, then top-p, then renormalised. Every section that says so
    derives from this, and `decoding.sampling.SamplingOptions` are these fields alone.

    Greedy decoding takes the most likely token, which no top-k or top-p removes, so they change nothing there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    temperature: Annotated[float, BeforeValidator(_temperature), Field(ge=0)] = 0.0
    """0: greedy, the most likely token, ties to the lowest id."""
    top_p: Annotated[float, BeforeValidator(_top_p), Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of most likely tokens that has this probability (1: off)."""
    top_k: Annotated[int, BeforeValidator(_top_k), Field(ge=0)] = 0
    """Sample from the k most likely tokens (0: off)."""
