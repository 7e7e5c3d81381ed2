"""What training asks of a method: an `ExampleMaker`, which finds what there is to learn in packed rows, and a
`Trainee`, which turns that into the terms of the loss.

They are two because they run in two places. Examples are made on the CPU by reader processes, ahead of the training:
what makes them is pickled, and holds no network. The trainee holds the network and runs on the training device; it
makes nothing that the host would have to wait for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from draftsmith.features.batch import PackedBatch


class Examples(Protocol):
    """What a method learns from in the rows of one micro-batch: tensors (as `base.tensor_fields.TensorFields` has
    them), and perhaps numbers. A class that derives from this protocol has no such numbers unless it says so."""

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers that shape the work on these examples beside the tensors' own shapes. Work that was recorded (a
        CUDA graph) serves examples of the same shapes and counts."""
        return ()

    def rounded(self) -> Self:
        """The same examples with counts rounded up, so that few of them occur."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, in one order for all examples of a kind."""
        ...

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A copy with every tensor passed through `function`, in the order of `tensors`."""
        ...


@dataclass(frozen=True)
class Draw:
    """What decides the random choices among a document's examples, together with its id: the same choices on whatever
    rank, in whatever row the document lands.

    most: how many examples to choose of a document (`train.num_anchors`), for methods that choose.
    """

    seed: int
    epoch: int
    most: int


@dataclass(frozen=True)
class Work:
    """What a micro-batch is, without what only fills its shape: `tokens` of documents, and the floating point
    operations of a forward and backward, with a multiplication and an addition counted as two."""

    tokens: int = 0
    flops: float = 0.0


class Corpus(Protocol):
    """The text that a draft is going to learn from."""

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often each of the target's tokens is supervised: [vocab_size] int64, on the CPU."""
        ...


ExamplesT = TypeVar("ExamplesT", bound=Examples)
ExamplesT_contra = TypeVar("ExamplesT_contra", bound=Examples, contravariant=True)


class ExampleMaker(Protocol[ExamplesT]):
    """Finds examples in packed rows, on the CPU. Instances are pickled for reader processes, and hold no network."""

    def examples(self, packed: PackedBatch, draw: Draw) -> ExamplesT:
        """What a training step learns from. Rows whose loss mask is empty give examples of the same kind, with nothing
        to learn."""
        ...

    def held_out(self, packed: PackedBatch, draw: Draw) -> ExamplesT:
        """What an evaluation judges a draft by: as in serving, whatever training shows."""
        ...

    def work(self, packed: PackedBatch, examples: ExamplesT) -> Work:
        """How much of `examples` counts."""
        ...

    def largest(self, rows: int, tokens: int) -> ExamplesT:
        """Examples on the meta device, no smaller in any tensor than those of any `rows` rows of `tokens` tokens."""
        ...


@dataclass(frozen=True)
class Terms:
    """One micro-batch's share of the loss and of the metrics, as sums that are divided once, globally.

    The gradient of the step is grad(sum of numerators) / (sum of denominators), sums over all ranks and the whole
    accumulation window. `metrics`: name -> (numerator, denominator), detached, both scalars or both one entry per label
    [P]; they are averaged the same way. All float32, so that they are copied together. Every method reports `loss` and
    `accept_length`: tokens that a verify would commit, teacher-forced, the target's own among them.
    """

    numerator: Tensor
    denominator: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Computation:
    """How a training computes; beside rounding, none of it changes what is learnt.

    device: where draft, ends and batches are. autocast: the dtype of forward and backward (None: that of the weights).
    attention: `train.attention`, "auto" for what the method takes to be the fastest here. recompute: keep no
    activations of the layers, and compute them again in the backward. compile_layers: fuse with torch.compile what lies
    between the attentions.
    """

    device: torch.device
    autocast: torch.dtype | None = None
    attention: str = "auto"
    recompute: bool = False
    compile_layers: bool = False


class Trainee(Protocol[ExamplesT_contra]):
    """A draft as it learns."""

    def terms(self, packed: PackedBatch, examples: ExamplesT_contra, progress: Tensor) -> Terms:
        """The terms of one micro-batch, by the draft's weights of the moment.

        packed: the rows with their features; examples: of these rows; progress: scalar float64 in [0, 1), the share of
        the run's optimiser steps already done. All on the draft's device: progress is a tensor so that a recording of
        the step's work (a CUDA graph) holds for every step.
        """
        ...


AnyExampleMaker: TypeAlias = ExampleMaker[Any]
AnyTrainee: TypeAlias = Trainee[Any]
"""Of a method whose examples are nobody else's business."""
