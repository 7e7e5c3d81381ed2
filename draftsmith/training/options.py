"""The recipe's `train` and `track` sections."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1, strict=True)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainOptions(_Section):
    """How a draft is trained. A step always means one optimiser step of all processes together.

    Length: `epochs` passes over the store, or exactly `max_steps` steps when that is given, however many passes that
    takes.

    Batch: a row holds whole documents, up to `tokens_per_row` tokens. A step consumes `rows_per_step` rows of all
    processes together, `rows_per_forward` at a time in each; the ratio is the gradient accumulation.

    Optimiser: AdamW on fp32 weights. The learning rate warms up linearly over `warmup_ratio` of the steps to `lr` and
    falls along a cosine to `lr * min_lr_ratio`; `weight_decay` applies to matrices only; `clip` bounds the gradient's
    norm (None: not clipped).
    """

    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None

    tokens_per_row: PositiveInt = 3072
    rows_per_step: PositiveInt = 1
    rows_per_forward: PositiveInt = 1
    num_anchors: PositiveInt = 512

    lr: Annotated[float, Field(gt=0)] = 6e-4
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.04
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    clip: Annotated[float, Field(gt=0)] | None = 1.0

    seed: Annotated[int, Field(ge=0)] = 0
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """The arithmetic of the forward and backward pass (weights and optimiser are fp32 either way).
    auto: bf16 on CUDA, fp32 on the CPU."""
    attention: Literal["auto", "dense", "flex"] = "auto"
    """auto: flex_attention on CUDA, scaled dot product attention with a dense mask on the CPU."""
    data_workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that read and pack batches ahead of training. None: 4 on CUDA, 0 on the CPU."""

    eval_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """The share of documents held out for evaluation, chosen by a hash of their ids (0: no evaluation)."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations. None: before the first step and after the last one only."""
    best_by: Literal["accept_length", "loss"] = "accept_length"
    """The held-out metric that says which checkpoint is the best."""

    save_every: PositiveInt | None = None
    """Steps between run checkpoints. None: only after the last step, at a new best evaluation and when interrupted."""
    keep_last: PositiveInt = 1
    keep_best: Annotated[int, Field(ge=0)] = 1

    @model_validator(mode="after")
    def _whole_forwards(self) -> "TrainOptions":
        if self.rows_per_step % self.rows_per_forward:
            raise ValueError(
                f"rows_per_step is {self.rows_per_step} and rows_per_forward is {self.rows_per_forward}: "
                "a step must be a whole number of forwards"
            )
        return self


RESUME_FIXED = ("tokens_per_row", "rows_per_step", "num_anchors", "seed", "eval_share", "betas", "best_by")
"""Options that a resumed run must share with its checkpoint: the data position or the optimiser state depends on
them."""


class TrackOptions(_Section):
    """Where the numbers of a run go: `every` steps to the console and `metrics.jsonl`, and to the trackers switched
    on."""

    every: PositiveInt = 10
    console: bool = True
    jsonl: bool = True
    tensorboard: bool = True
    wandb: bool = False
    trackio: bool = False
    project: str = "draftsmith"
    run_name: str | None = None
    """The run's name in Weights & Biases and Trackio. None: the run directory's name."""
