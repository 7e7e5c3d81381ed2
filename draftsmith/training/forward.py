"""One forward of a draft over a micro-batch, as one module, so that DDP wraps exactly what is trained."""

import torch
from torch import Tensor, nn

from draftsmith.algorithms.algorithm import BlockOutputs, Objective
from draftsmith.blocks.masks import AttentionBackend, training_attention
from draftsmith.drafts.draft import Draft
from draftsmith.features.schema import FINAL_STATE, TAPS
from draftsmith.targets.ends import TargetEnds
from draftsmith.training.batches import MicroBatch

Metrics = dict[str, tuple[Tensor, Tensor]]


class DraftLoss(nn.Module):
    """Micro-batch -> the objective's numerator, denominator and metrics, under the run's precision.

    The draft's weights are fp32; with `autocast` torch.bfloat16 the matrix products run in bf16, whose rounding never
    reaches the weights. `recompute`: layers keep no activations for the backward, which computes them again;
    `compile_layers`: each layer is fused by torch.compile. The target's ends are no submodule: they are neither trained
    nor synchronised nor saved.
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
        self._frozen = (ends,)  # in a tuple, so that it is not registered
        self._objective = objective
        self._attention = attention
        self._autocast = autocast
        draft.backbone.recompute = recompute
        if compile_layers:
            for layer in draft.backbone.layers:
                layer.compile(dynamic=True)

    def forward(self, batch: MicroBatch, progress: float) -> tuple[Tensor, Tensor, Metrics]:
        """batch on the draft's device; progress in [0, 1), the share of the run's steps already done."""
        packed, blocks, (ends,) = batch.packed, batch.blocks, self._frozen
        device = packed.input_ids.device
        with torch.autocast(device.type, dtype=self._autocast, enabled=self._autocast is not None):
            attend = training_attention(blocks, packed.document, self.draft.attention_kinds, self._attention)
            context = self.draft.context_keys_values(packed.features[TAPS], packed.positions)
            hidden = self.draft(ends.embedding_rows(blocks.input_ids), blocks.positions, context, attend)
            outputs = BlockOutputs(hidden, blocks, packed.features.get(FINAL_STATE), progress)
            terms = self._objective.terms(self.draft, ends, outputs)
        return terms.numerator + self._untouched(), terms.denominator, terms.metrics

    def _untouched(self) -> Tensor:
        """A zero that depends on every parameter: a process whose micro-batch has no label still hands DDP a gradient
        for each, as the other processes do."""
        return sum(
            (p.flatten()[:0].sum() for p in self.draft.parameters()), start=torch.zeros((), device=self.draft.device)
        )
