"""The recipe's `train` and `track` sections."""

from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.section import DraftSection
from draftsmith.base.fields import PlaceField
from draftsmith.errors import DraftsmithError

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OnlineOptions(_Section):
    """Features of `train.features: online`. Where the target runs is `target.device`, and the precision of features is
    `capture.dtype`, as in a store.

    cache: a directory that keeps every document's features as a store, once it is captured; when all are there, they
    are read. None: nothing is kept, and every pass runs the target again. One process only.
    """

    cache: PlaceField | None = None


class TrainOptions(_Section):
    """How a draft is trained. A step always means one optimiser step of all processes together.

    Length: `epochs` passes over the training documents, each of which comes once a pass, or exactly `max_steps` steps
    when that is given, however many passes that takes.

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

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """The arithmetic of the forward and backward pass (weights and optimiser are fp32 either way).
    auto: bf16 on CUDA, fp32 on the CPU."""
    attention: Literal["auto", "dense", "flex", "anchored"] = "auto"
    """dense: scaled dot product attention with a dense mask. flex: flex_attention. anchored: kernels made for blocks
    over contexts. auto: dense on the CPU; on CUDA anchored where the kernels take the draft's heads and blocks and the
    precision, else flex."""
    data_workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that read and pack batches ahead of training, two each, in shared memory (/dev/shm). None: 4 on CUDA,
    0 on the CPU."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What several processes share. ddp: each holds the whole draft. fsdp: weights, gradients, optimiser state and
    checkpoints are split over them; the weights are gathered for the forward and backward of a step."""
    gradient_checkpointing: bool = False
    """Compute a layer's activations again in the backward pass instead of keeping them: less memory, more time."""
    compile: bool | Literal["auto"] = "auto"
    """Fuse each layer's operations with torch.compile, which takes half a minute to a minute at the first step,
    and some time again, for the context's part, when the length of a row first changes. auto: on CUDA."""
    graphs: bool = False
    """Replay forward and backward as CUDA graphs, one for every shape of batch: for drafts so small that the host
    cannot keep up with the device. One process, one forward a step; each shape keeps a copy of its batch in memory.
    Where too many shapes come up, the later ones run eagerly, and the log says so."""

    features: Literal["store", "online"] = "store"
    """store: read what `capture` wrote. online: run the frozen target beside the training, storing nothing."""
    online: OnlineOptions = OnlineOptions()

    skip_nonfinite: bool = False
    """A step whose loss or gradient is not finite is never applied. False: it stops the run, with a debug record.
    True: it is left out, counted and logged (`skipped`), and training goes on."""

    eval_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """The share of documents held out for evaluation, chosen by a hash of their ids (0: no evaluation)."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations. None: before the first step and after the last one only."""
    eval_prompts: Annotated[int, Field(ge=0)] = 0
    """Prompts of `bench.prompts` that every evaluation also answers with the real engine (0: none)."""
    eval_prompt_tokens: PositiveInt = 64
    """New tokens of each of those answers."""
    best_by: Literal["accept_length", "loss"] = "accept_length"
    """The held-out metric that says which checkpoint is the best."""

    save_every: PositiveInt | None = None
    """Steps between run checkpoints. None: only after the last step, at a new best evaluation and when interrupted."""
    keep_last: PositiveInt = 1
    """So many of the newest run checkpoints are kept."""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """So are so many of those with the best evaluations by `best_by`. 0: none, and a new best evaluation saves none."""

    def workers(self, device: torch.device) -> int:
        """Processes that read ahead of a training on `device`."""
        if self.data_workers is not None:
            return self.data_workers
        return 4 if device.type == "cuda" else 0

    @model_validator(mode="after")
    def _agree(self) -> "TrainOptions":
        if self.rows_per_step % self.rows_per_forward:
            raise ValueError(
                f"rows_per_step is {self.rows_per_step} and rows_per_forward is {self.rows_per_forward}: "
                "a step must be a whole number of forwards"
            )
        if self.graphs and self.rows_per_step != self.rows_per_forward:
            raise ValueError(
                f"graphs is on with rows_per_step {self.rows_per_step} and rows_per_forward {self.rows_per_forward}: "
                "one forward of one process is replayed, so both must be equal; or switch graphs off"
            )
        if self.graphs and self.device == "cpu":
            raise ValueError("graphs is on with device 'cpu', and graphs are CUDA's: switch one of them")
        asked = {"eval_every": self.eval_every, "eval_prompts": self.eval_prompts or None}
        unused = [f"{name} is {value}" for name, value in asked.items() if value is not None]
        if self.eval_share == 0 and unused:
            raise ValueError(
                f"{' and '.join(unused)} with eval_share 0, and nothing is evaluated without held-out documents: set "
                "eval_share, or leave that out"
            )
        if self.features == "online" and self.data_workers:
            raise ValueError(
                f"data_workers is {self.data_workers} with features 'online': the target runs in the training process, "
                "which captures the next batch by itself; leave data_workers out"
            )
        if self.features == "store" and self.online.cache is not None:
            raise ValueError(
                f"online.cache is {self.online.cache!r} with features 'store'; set features to 'online' or leave it out"
            )
        return self


def check_replayable(draft_section: DraftSection, options: TrainOptions) -> None:
    """Raise `DraftsmithError` where `train.graphs` is on and the draft's objective cannot be recorded."""
    if options.graphs and not algorithm(draft_section.algorithm).replayable(draft_section):
        raise DraftsmithError(
            "train.graphs is on, and the size of what draft.objective computes with is known to the device only (a "
            "sampled vocabulary, draft.objective.negatives): leave that out, or switch train.graphs off"
        )


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
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """The device's peak in TFLOP/s, of which `mfu` is the share used. None: what is known of the GPU's name (without
    it, `mfu` is not logged)."""
    run_name: str | None = None
    """The run's name in Weights & Biases and Trackio. None: the run directory's name."""
