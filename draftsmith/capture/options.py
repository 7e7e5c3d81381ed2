"""The recipe's `capture` section."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.base.fields import PathField
from draftsmith.features.manifest import StoreDtype
from draftsmith.features.shards import DEFAULT_SHARD_BYTES


class SglangOptions(BaseModel):
    """Settings of the backend `sglang`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    capture_method: Literal["dflash", "eagle3"] = Field(
        default="dflash",
        description="Which of SGLang's hooks names the layers: `dflash` for the DFlash family, `eagle3` for EAGLE-3.",
    )
    memory_fraction: float = Field(
        default=0.6, gt=0, lt=1, description="SGLang's mem_fraction_static: weights and cache, of the GPU's memory."
    )
    engine: dict[str, str | int | float | bool] = Field(
        default={}, description="Further keywords of sglang.Engine, such as tp_size or attention_backend."
    )
    storage: PathField = Field(
        default=Path("/dev/shm"),
        description="A directory in memory through which states are handed over: it holds those of one batch.",
    )
    timeout_seconds: float = Field(
        default=1800.0, gt=0.0, description="The longest wait for the engine's start, and for one batch."
    )


class VllmOptions(BaseModel):
    """Settings of the backend `vllm`: a running server (docs/capture.md says how to start it)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str = Field(
        default="http://localhost:8000/v1", pattern=r"^https?://", description="The server, up to and including /v1."
    )
    model: str | None = Field(default=None, description="The model's name on the server; unset: `target.path`.")
    concurrency: int = Field(default=16, ge=1, description="The most requests under way at a time.")
    timeout_seconds: float = Field(default=600.0, gt=0.0, description="The longest wait for one document.")
    retries: int = Field(default=3, ge=0, description="Further tries of a request that met a passing fault.")
    server_device: Literal["cuda", "cpu"] = Field(
        default="cuda",
        description="Where the server runs: it decides the command that is printed for it. `cpu`: with draftsmith's "
        "connector, since vLLM's own needs CUDA's streams; draftsmith must be importable there.",
    )


class CaptureOptions(BaseModel):
    """How the target is run over the samples and how its features are stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["hf", "sglang", "vllm"] = Field(
        default="hf",
        description="What runs the target: `hf`, transformers in this process; `sglang`, SGLang in one beside it; "
        "`vllm`, a vLLM server that keeps hidden states.",
    )
    sglang: SglangOptions = SglangOptions()
    vllm: VllmOptions = VllmOptions()
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
        description="The most bytes of features in one file; a killed process loses what its memory holds, at most "
        "four such files.",
    )
    check_samples: int = Field(
        default=2,
        ge=0,
        description="With `sglang` and `vllm`: documents whose beginnings transformers computes too, on the CPU, for "
        "comparison before anything is stored; 0: none.",
    )
    max_refused_share: float = Field(
        default=0.01, ge=0, le=1, description="The largest share of unusable samples that is put up with."
    )
    force: bool = Field(default=False, description="Start although the free disk space looks too small.")
