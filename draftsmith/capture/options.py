"""The recipe's `capture` section."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.features.manifest import StoreDtype
from draftsmith.features.shards import DEFAULT_SHARD_BYTES


class CaptureOptions(BaseModel):
    """How the target is run over the samples and how its features are stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["hf"] = Field(
        default="hf", description="What runs the target: `hf`, transformers in this process."
    )
    dtype: StoreDtype = Field(
        default="bfloat16",
        description="The precision that features are stored in; `fp8`: 8 bits with a scale per token and layer.",
    )
    tokens_per_batch: int = Field(
        default=8192, ge=1, description="The most tokens (padding included) of one forward; a longer sample runs alone."
    )
    shard_bytes: int = Field(
        default=DEFAULT_SHARD_BYTES,
        ge=1,
        description="The most bytes of features in one file; a killed capture loses at most one such file's work.",
    )
    max_refused_share: float = Field(
        default=0.01, ge=0, le=1, description="The largest share of unusable samples that is put up with."
    )
    force: bool = Field(default=False, description="Start although the free disk space looks too small.")
