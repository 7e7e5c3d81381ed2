"""One forward of a draft over a micro-batch, as one module, so that DDP wraps exactly what is trained."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from draftsmith.algorithms.algorithm import BlockOutputs, Objective, Terms
from draftsmith.blocks.masks import AttentionBackend, training_attention
from draftsmith.drafts.draft import Draft
from draftsmith.features.schema import FINAL_STATE, TAPS
from draftsmith.targets.ends import TargetEnds
from draftsmith.training.batches import MicroBatch
from draftsmith.training.working import working_weights

Metrics = dict[str, tuple[Tensor, Tensor]]


def share_done(done: int, total: int, device: torch.device) -> Tensor:
    """done / total, scalar float64 on `device`: `BlockOutputs.progress` before step `done` of a run of `total`."""
    # Filled there: a tensor made of a number on the host would be copied, and the copy waited for.
    return torch.full((), done / total, dtype=torch.float64, device=device)


class DraftLoss(nn.Module):
    """Micro-batch -> the objective's numerator, denominator and metrics, under the run's precision.

    The draft's weights are fp32. With `autocast` torch.bfloat16 a forward computes with bf16 copies of the matrices,
    and states are bf16 between the layers, as where drafts are served; the rounding never reaches the weights.
    `recompute`: layers keep no activations for the backward, which computes them again; `compile_layers`: what lies
    between the attentions is fused by torch.compile. The target's ends are no submodule: they are neither trained nor
    synchronised nor saved.
    """

    def __init__(
        self,
        draft: Draft,
        ends: TargetEnds,
        objective: Objective,
        *,
        attention: AttentionBackend,
        autocast: torch.dtype | None,
        recompute: bool = False,
        compile_layers: bool = False,
    ) -> None:
        super().__init__()
        self.draft = draft
        self._autocast = autocast
        # In a tuple, so that it is not registered: this module's parameters are the draft's and bear its name alone.
        self._compute = (_Compute(draft, ends, objective, attention),)
        draft.backbone.recompute = recompute
        if compile_layers:
            draft.backbone.fuse()

    def forward(self, batch: MicroBatch, progress: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        """batch on the draft's device; progress as from `share_done`."""
        (compute,) = self._compute
        weights, zero = working_weights(self.draft, self._autocast)
        with torch.autocast(self.draft.device.type, dtype=self._autocast, enabled=self._autocast is not None):
            terms = functional_call(
                compute, {f"draft.{name}": weight for name, weight in weights.items()}, (batch, progress)
            )
        return terms.numerator + zero, terms.denominator, terms.metrics


class _Compute(nn.Module):
    """The forward itself, with whatever weights the draft has at the time."""

    def __init__(self, draft: Draft, ends: TargetEnds, objective: Objective, attention: AttentionBackend) -> None:
        super().__init__()
        self.draft = draft
        self._frozen = (ends,)
        self._objective = objective
        self._attention = attention

    def forward(self, batch: MicroBatch, progress: Tensor) -> Terms:
        """Blocks over their context, then the objective on the slots' states; arguments as for `DraftLoss.forward`.
        Raises `DraftsmithError` where the attention cannot run on the batch's device."""
        packed, blocks, (ends,) = batch.packed, batch.blocks, self._frozen
        attend = training_attention(blocks, packed.document, self.draft.attention_kinds, self._attention)
        context = self.draft.context_keys_values(packed.features[TAPS], packed.positions)
        hidden = self.draft(ends.embedding_rows(blocks.input_ids), blocks.positions, context, attend)
        outputs = BlockOutputs(hidden, blocks, packed.features.get(FINAL_STATE), progress)
        return self._objective.terms(self.draft, ends, outputs)
