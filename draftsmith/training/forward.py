"""One forward of a draft over a micro-batch, as one module, so that DDP wraps exactly what is trained."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from draftsmith.algorithms.trainee import AnyTrainee, Terms
from draftsmith.drafts.draft import Draft
from draftsmith.training.micro_batch import MicroBatch
from draftsmith.training.working import working_weights

Metrics = dict[str, tuple[Tensor, Tensor]]


def share_done(done: int, total: int, device: torch.device) -> Tensor:
    """done / total, scalar float64 on `device`: `Trainee.terms`' progress before step `done` of a run of `total`."""
    # Filled there: a tensor made of a number on the host would be copied, and the copy waited for.
    return torch.full((), done / total, dtype=torch.float64, device=device)


class DraftLoss(nn.Module):
    """Micro-batch -> the loss's numerator, denominator and metrics, under the run's precision.

    The draft's weights are fp32. With `autocast` torch.bfloat16 a forward computes with bf16 copies of the matrices,
    and states are bf16 between the layers, as where drafts are served; the rounding never reaches the weights. The
    trainee is that of `draft`. What it holds beside the draft (the target's ends) is neither trained nor synchronised
    nor saved.
    """

    def __init__(self, draft: Draft, trainee: AnyTrainee, *, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.draft = draft
        self.trainee = trainee
        self._autocast = autocast
        # In a tuple, so that it is not registered: this module's parameters are the draft's and bear its name alone.
        self._compute = (_Compute(draft, trainee),)

    def forward(self, batch: MicroBatch, progress: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        """batch on the draft's device; progress as from `share_done`."""
        (compute,) = self._compute
        weights, zero = working_weights(self.draft, self._autocast, self.draft.backbone.read_first)
        with torch.autocast(self.draft.device.type, dtype=self._autocast, enabled=self._autocast is not None):
            terms = functional_call(
                compute, {f"draft.{name}": weight for name, weight in weights.items()}, (batch, progress)
            )
        return terms.numerator + zero, terms.denominator, terms.metrics


class _Compute(nn.Module):
    """The forward itself, with whatever weights the draft has at the time."""

    def __init__(self, draft: Draft, trainee: AnyTrainee) -> None:
        super().__init__()
        self.draft = draft
        self._trainee = trainee

    def forward(self, batch: MicroBatch, progress: Tensor) -> Terms:
        return self._trainee.terms(batch.packed, batch.examples, progress)
