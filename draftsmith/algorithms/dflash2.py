"""DFlash 2: DFlash with convolutions around its sublayers, and a selector that picks a path through the candidates of
the slots, left to right (Inco AI, 2026)."""

import logging
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from draftsmith.algorithms.block_algorithm import BlockAlgorithm
from draftsmith.algorithms.block_drafter import Filler, check_num_proposals
from draftsmith.algorithms.block_trainee import BlockOutputs
from draftsmith.algorithms.dflash2_path import DFlash2Filler
from draftsmith.algorithms.dflash2_rollout import KernelDFlash2Filler
from draftsmith.algorithms.labelled import Chosen, HeadOptions
from draftsmith.algorithms.metrics import label_metrics
from draftsmith.algorithms.options import DecodingOptions
from draftsmith.algorithms.section import DraftSection, with_head
from draftsmith.algorithms.trainee import Terms
from draftsmith.algorithms.weighting import DecayWeighting, Weighting
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads.dflash2 import CandidateSelector, DFlash2Head, DFlash2HeadConfig
from draftsmith.kernels.rollout.candidate_path import fits
from draftsmith.kernels.vocabulary.softmax_rows import gradient, statistics
from draftsmith.losses.chunked import Chunk, chunked_sum
from draftsmith.targets.ends import TargetEnds

_log = logging.getLogger(__name__)


class DFlash2ObjectiveOptions(HeadOptions):
    """`draft.objective` of DFlash 2: how labels are weighted, the share of the selector's loss (alpha_s), and how many
    slots go through the output head at a time (whole blocks, at least one)."""

    weighting: Weighting = DecayWeighting()
    selector_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)


@with_head(DFlash2HeadConfig)
class DFlash2Section(DraftSection):
    """The recipe's `draft` section for DFlash 2. The sizes of convolutions and selector are those of published drafts
    unless the recipe, or the checkpoint of `init_from`, says otherwise."""

    algorithm: Literal["dflash2"] = "dflash2"
    objective: DFlash2ObjectiveOptions = DFlash2ObjectiveOptions()


@dataclass(frozen=True)
class DFlash2Objective:
    """sum(w * CE) + alpha_s * sum(w' * CE_selector), over the weighting's own denominator.

    CE is that of the unary logits over the vocabulary, CE_selector that of the selector's scores over the slot's
    candidates, given the true token before; a label that is not among them takes the place of the weakest. Weights
    that follow from losses (D-PACE) follow for each sum from its own.
    """

    layout: BlockLayout
    options: DFlash2ObjectiveOptions

    def terms(self, draft: Draft[DFlash2Head], ends: TargetEnds, outputs: BlockOutputs) -> Terms:
        """Works through chunks of whole blocks, because a label's weight may depend on its block's other losses."""
        blocks, options = outputs.blocks, self.options
        selector = draft.head.candidate_selector
        hidden = self.layout.predicting(outputs.hidden, dim=2)  # [R, N, P, H]
        chosen = Chosen.blocks(blocks)  # n of them
        labels, mask, previous = (chosen.take(t) for t in (blocks.labels, blocks.label_mask, blocks.previous_ids))
        first_label = chosen.take(blocks.first_label)
        block_hidden = chosen.take(hidden)  # [n, P, H]
        latent = selector.latent(block_hidden, previous)  # [n, P, rank]

        def compute(part: slice, h: Tensor, v: Tensor, successor: Tensor) -> Chunk:
            counted = mask[part]  # [n', P]
            gold = torch.where(counted, labels[part], -1).flatten()  # [m]
            unary = draft.logits(h.flatten(0, 1), ends)  # [m, V]
            lse, unary_losses, unary_ids = statistics(unary.detach(), None, gold)
            choice = select(selector, unary, v.flatten(0, 1), gold.clamp_min(0), successor)

            def weighted(losses: Tensor) -> tuple[Tensor, Tensor]:
                every = torch.where(counted, losses.view_as(counted), 0.0)  # [n', P]
                weights = options.weighting.label_weights(every, counted, first_label[part])
                return (weights * every).sum(), weights.flatten()

            unary_sum, unary_weights = weighted(unary_losses)
            selector_sum, _ = weighted(choice.losses)
            total = unary_sum + options.selector_weight * selector_sum
            found = (unary_ids, choice.predicted, choice.present)
            results = (*(ids.view_as(counted) for ids in found), unary_sum.view(1), selector_sum.view(1))
            if not torch.is_grad_enabled():
                return Chunk(total, results)
            of_unary, _ = gradient(unary.detach(), None, gold, lse, unary_weights)
            return Chunk(
                total,
                results,
                (unary, selector_sum),
                (of_unary, torch.full_like(selector_sum, options.selector_weight)),
            )

        numerator, (unary_ids, predicted, present, unary_sums, selector_sums) = chunked_sum(
            compute,
            (block_hidden, latent),
            (selector.successor_codebook,),
            chunk=max(1, options.rows_at_a_time(ends) // self.layout.num_labels),  # whole blocks
        )
        denominator = options.weighting.denominator(blocks)
        labelled = blocks.label_mask.sum((0, 1)).float()
        before = label_metrics(chosen.spread(unary_ids), blocks)
        metrics = {
            "loss": (numerator.detach(), denominator),
            "base_loss": (unary_sums.sum(), denominator),
            "selector_loss": (selector_sums.sum(), denominator),
            "candidate_recall": (chosen.spread(present.long()).sum((0, 1)).float(), labelled),
            **label_metrics(chosen.spread(predicted), blocks),
            **{f"base_{name}": pair for name, pair in before.items()},
        }
        return Terms(numerator, denominator, metrics)


@dataclass(frozen=True)
class Choice:
    """The selector's choice for m labels: losses [m] float32, differentiable; predicted [m] int64, the best of the
    candidates; present [m] bool, whether the label is one of them."""

    losses: Tensor
    predicted: Tensor
    present: Tensor


def select(
    selector: CandidateSelector, unary: Tensor, latent: Tensor, gold: Tensor, successor: Tensor | None = None
) -> Choice:
    """unary [m, V], latent [m, rank] of the true tokens before, gold [m] int64; successor as for `scores`."""
    candidates = selector.candidates(unary.detach())  # [m, K], likeliest first
    scores = selector.scores(unary, latent, torch.cat((candidates, gold.unsqueeze(-1)), dim=-1), successor)
    offered, gold_score = scores[:, :-1], scores[:, -1]
    present = (candidates == gold.unsqueeze(-1)).any(-1)
    weakest = torch.where(present, offered[:, -1], gold_score)
    trained = torch.cat((offered[:, :-1], weakest.unsqueeze(-1)), dim=-1)  # [m, K]
    return Choice(trained.logsumexp(-1) - gold_score, _best(offered.detach(), candidates), present)


def _best(scores: Tensor, ids: Tensor) -> Tensor:
    """The id of the highest score, ties to the lowest id, as the full vocabulary's argmax would have it."""
    best = scores == scores.amax(-1, keepdim=True)
    return torch.where(best, ids, ids.amax(-1, keepdim=True)).amin(-1)


class DFlash2(BlockAlgorithm[DFlash2Section, DFlash2Head, DecodingOptions]):
    """One forward, then B-1 small steps of the selector over each slot's candidates, which are all that it proposes."""

    name = "dflash2"
    head = DFlash2HeadConfig
    summary = "Masked block with convolutions, and a selector that picks a path through each slot's candidates"
    paper = "Inco AI, 2026-08"
    section = DFlash2Section

    def block_layout(self, config: DraftConfig) -> BlockLayout:
        return BlockLayout(BlockKind.ANCHOR_KNOWN, config.block_for("dflash2").size)

    def objective(self, config: DraftConfig, section: DFlash2Section) -> DFlash2Objective:
        return DFlash2Objective(self.block_layout(config), section.objective)

    def filler(self, draft: Draft[DFlash2Head], ends: TargetEnds, options: DecodingOptions) -> Filler[DFlash2Head]:
        if draft.device.type != "cuda":
            return self.stepwise_filler(draft, ends, options.num_proposals)
        head = DFlash2HeadConfig.of(draft.config)
        if not fits(head.selector_top_k, head.selector_rank):
            _log.warning(
                "dflash2: no kernel walks the path through %d candidates of rank %d (docs/methods/dflash2.md); it is "
                "walked by PyTorch operations, which takes longer",
                head.selector_top_k,
                head.selector_rank,
            )
            return self.stepwise_filler(draft, ends, options.num_proposals)
        layout = self.block_layout(draft.config)
        return KernelDFlash2Filler(draft, ends, layout, check_num_proposals(options.num_proposals, layout))

    def stepwise_filler(
        self, draft: Draft[DFlash2Head], ends: TargetEnds, num_proposals: int | None = None
    ) -> Filler[DFlash2Head]:
        layout = self.block_layout(draft.config)
        return DFlash2Filler(draft, ends, layout, check_num_proposals(num_proposals, layout))
