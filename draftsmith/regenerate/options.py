"""The recipe's `regenerate` section."""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.decoding.options import SamplingFields


class EndpointOptions(BaseModel):
    """Which server to ask, and how persistently."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str = Field(pattern=r"^https?://", description="Up to and including /v1.")
    model: str = Field(description="The name under which the server serves the target.")
    api_key_env: str = Field(
        default="OPENAI_API_KEY", description="The environment variable with the API key; unset: none is sent."
    )
    concurrency: int = Field(default=16, ge=1, description="The most conversations under way at a time.")
    retries: int = Field(default=5, ge=0, description="Further tries of a request that met a passing fault.")
    backoff_seconds: float = Field(default=1.0, gt=0.0, description="The first wait; each next one is twice as long.")
    timeout_seconds: float = Field(default=600.0, gt=0.0, description="The longest wait for one answer.")
    leave_out: tuple[
        Literal[
            "n",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "return_token_ids",
            "skip_special_tokens",
        ],
        ...,
    ] = Field(
        default=(),
        description="Fields of a request that the server does not know and refuses; what it then does is its own "
        "affair.",
    )


class RegenerateOptions(SamplingFields):
    """The recipe's `regenerate` section: how the target answers."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"batch_size", "endpoint", "max_refused_share"})
    """Fields that answers do not depend on: how many are made at a time, or where."""

    max_new_tokens: int = Field(default=512, ge=1, description="The most tokens of one answer.")
    seed: int = Field(default=0, ge=0, description="For sampling: an answer depends on it and on its prompt alone.")
    batch_size: int = Field(default=16, ge=1, description="Prompts that the local engine answers side by side.")
    max_refused_share: float = Field(
        default=0.01, ge=0, le=1, description="The largest share of prompts that may be left without an answer."
    )
    endpoint: EndpointOptions | None = Field(
        default=None, description="An OpenAI-compatible server to ask in place of the local engine."
    )
