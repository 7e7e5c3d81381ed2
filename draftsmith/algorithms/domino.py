"""Domino: a masked block with logits corrected, left to right, by what the block says so far (arXiv 2605.29707)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, StrictBool
from torch import Tensor

from draftsmith.algorithms.block_algorithm import BlockAlgorithm
from draftsmith.algorithms.block_drafter import Filler, check_num_proposals
from draftsmith.algorithms.block_trainee import BlockOutputs
from draftsmith.algorithms.domino_rollout import KeyedDominoFiller
from draftsmith.algorithms.drafter import Proposals, Sampler
from draftsmith.algorithms.labelled import Chosen, HeadOptions
from draftsmith.algorithms.metrics import label_metrics
from draftsmith.algorithms.rollout import RolloutOptions, check_vocabulary
from draftsmith.algorithms.section import DraftSection, with_head
from draftsmith.algorithms.serving import Served, Serving
from draftsmith.algorithms.trainee import Terms
from draftsmith.algorithms.weighting import DecayWeighting, FixedWeighting
from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads.domino import DominoHead, DominoHeadConfig
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.vocabulary.softmax_rows import gradient, statistics
from draftsmith.losses.chunked import Chunk, chunked_sum
from draftsmith.targets.ends import TargetEnds


class DominoObjectiveOptions(HeadOptions):
    """`draft.objective` of Domino: position weights, the curriculum, and how many slots go through the output head at a
    time.

    The share of the uncorrected logits in the loss falls along a line from `lambda_start` to 0, which it reaches after
    `lambda_decay_ratio` of the run's optimiser steps.
    """

    weighting: FixedWeighting = DecayWeighting()
    lambda_start: float = Field(default=1.0, ge=0, le=1)
    lambda_decay_ratio: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    def base_share(self, progress: Tensor) -> Tensor:
        """lambda, scalar, at `progress`, scalar in [0, 1): the share of optimiser steps done."""
        return self.lambda_start * (1.0 - progress / self.lambda_decay_ratio).clamp_min(0.0)


class DominoDecodingOptions(RolloutOptions):
    """`token_table`: keep the GRU's input side of every token, 3 G numbers a token, instead of multiplying at each
    step; for the rollouts `dense` and `pruned`."""

    token_table: StrictBool = False


@with_head(DominoHeadConfig)
class DominoSection(DraftSection):
    """The recipe's `draft` section for Domino. `gru_hidden_dim` and `emb_dim` have no default; the head's fields mean
    what they mean in `DominoHeadConfig`."""

    algorithm: Literal["domino"] = "domino"
    objective: DominoObjectiveOptions = DominoObjectiveOptions()


@dataclass(frozen=True)
class DominoObjective:
    """(1 - lambda) * CE(b + e) + lambda * CE(b), both summed with the same position weights over the sum of them."""

    layout: BlockLayout
    options: DominoObjectiveOptions

    def terms(self, draft: Draft[DominoHead], ends: TargetEnds, outputs: BlockOutputs) -> Terms:
        """Base and corrected logits of a chunk of slots are made together, from one pass through the output head."""
        blocks = outputs.blocks
        share = self.options.base_share(outputs.progress)
        hidden = self.layout.predicting(outputs.hidden, dim=2)  # [R, N, P, H]
        weights = self.options.weighting.weights(blocks)  # [R, N, P]
        chosen = Chosen.labels(blocks)  # m of them
        selected = [chosen.take(t) for t in (hidden, corrections(draft, ends, hidden, blocks))]
        row_labels = chosen.take(torch.where(blocks.label_mask, blocks.labels, -1))
        row_weights = chosen.take(weights)
        head = draft.head

        def compute(part: slice, h: Tensor, latent: Tensor, output_weight: Tensor) -> Chunk:
            outputs = (draft.logits(h, ends), head.correction(latent, output_weight))  # both [m', V]
            base, correction = (output.detach() for output in outputs)
            labels, weights = row_labels[part], row_weights[part]
            base_lse, base_loss, base_ids = statistics(base, None, labels)
            lse, final_loss, ids = statistics(base, correction, labels)
            total = (weights * ((1.0 - share) * final_loss + share * base_loss)).sum()
            results = (base_loss, final_loss, base_ids, ids)
            if not torch.is_grad_enabled():
                return Chunk(total, results)
            of_correction, of_base = gradient(
                base, correction, labels, lse, (1.0 - share) * weights, base=(base_lse, share * weights)
            )
            assert of_base is not None
            return Chunk(total, results, outputs, (of_base, of_correction.to(correction.dtype)))

        numerator, (base_loss, final_loss, base_predicted, predicted) = chunked_sum(
            compute,
            selected,
            (head.output_weight,),
            chunk=self.options.rows_at_a_time(ends),
        )
        denominator = weights.sum()

        before = label_metrics(chosen.spread(base_predicted), blocks)
        metrics = {
            "loss": (numerator.detach(), denominator),
            "base_loss": ((row_weights * base_loss).sum(), denominator),
            "final_loss": ((row_weights * final_loss).sum(), denominator),
            "lambda": ((denominator * share).float(), denominator),
            **label_metrics(chosen.spread(predicted), blocks),
            **{f"base_{name}": pair for name, pair in before.items()},
        }
        return Terms(numerator, denominator, metrics)


def corrections(draft: Draft[DominoHead], ends: TargetEnds, hidden: Tensor, blocks: Blocks) -> Tensor:
    """The latents whose product with W2 is the correction, with the true tokens as prefix.

    hidden [R, N, P, H], of the predicting slots -> [R, N, P, E]. Zero where the logits are not corrected: there W2,
    which has no bias, adds exactly nothing.
    """
    head = draft.head
    states = head.prefix_states(draft.scaled(ends.embedding_rows(blocks.previous_ids)))  # [R, N, P, G]
    latent = head.latent(hidden, states)
    label = torch.arange(latent.shape[2], device=latent.device)
    return latent * (label >= head.pure_draft_prefix_len).unsqueeze(-1)


class DominoFiller(Filler[DominoHead]):
    """Fills the block left to right: each token is drawn from (or is the argmax of) the logits that the tokens before
    it have corrected, over the whole vocabulary. All state is in tensors; every step is the same work."""

    def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposals:
        """As in `Filler`."""
        head = self.draft.head
        slots = self.predicting(hidden).contiguous()  # [batch, P, H]
        base = self.draft.logits(slots, self.ends)  # [batch, P, V]
        draws = []
        previous = self.draft.scaled(self.ends.embedding_rows(anchor_ids))  # [batch, H]
        state = head.empty_prefix(previous)  # [batch, G]
        for label in range(self.num_proposals):
            state = head.read(state, previous)
            logits = base[:, label]
            if label >= head.pure_draft_prefix_len:
                logits = head.correct(logits, head.latent(slots[:, label], state))
            ids, q = sampler(logits, label)
            previous = self.draft.scaled(self.ends.embedding_rows(ids))
            draws.append((ids, q))
        return Proposals.of_draws(draws)


class Domino(BlockAlgorithm[DominoSection, DominoHead, DominoDecodingOptions]):
    """One forward, then a step of the GRU and the correction for each token: B-1 of them, or B where the anchor's own
    slot predicts (`shift_label`)."""

    name = "domino"
    head = DominoHeadConfig
    summary = "Masked block, corrected left to right by a GRU over the block's own tokens"
    paper = "arXiv 2605.29707"
    section = DominoSection
    decoding_options = DominoDecodingOptions
    published_head: ClassVar[dict[str, Any]] = {
        "gru_hidden_dim": 1024,
        "emb_dim": 256,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    }

    def block_layout(self, config: DraftConfig) -> BlockLayout:
        shifted = DominoHeadConfig.of(config).shift_label
        return BlockLayout(
            BlockKind.ANCHOR_FIRST if shifted else BlockKind.ANCHOR_KNOWN, config.block_for("domino").size
        )

    def serving(self, config: DraftConfig) -> Serving:
        """SGLang verifies block_size tokens whether labels are shifted or not: of shifted ones the last is not used."""
        return Serving(Served("DFLASH", config.block_for("domino").size), None)

    def objective(self, config: DraftConfig, section: DominoSection) -> DominoObjective:
        return DominoObjective(self.block_layout(config), section.objective)

    def filler(self, draft: Draft[DominoHead], ends: TargetEnds, options: DominoDecodingOptions) -> Filler[DominoHead]:
        weight = draft.head.output_weight
        part = check_vocabulary(self.name, draft, ends, weight, options)
        layout = self.block_layout(draft.config)
        count = check_num_proposals(options.num_proposals, layout)
        rollout = options.resolve(self.name, weight[part.first : part.last])
        if rollout == "plain":
            if options.token_table:
                raise DraftsmithError(
                    "domino: token_table is True, and the rollout is 'plain', which reads none; leave it out, or set "
                    "rollout to 'dense' or 'pruned'"
                )
            return DominoFiller(draft, ends, layout, count)
        return KeyedDominoFiller.of(
            draft,
            ends,
            layout,
            count,
            part,
            pruned=rollout == "pruned",
            with_table=options.token_table,
        )

    def stepwise_filler(
        self, draft: Draft[DominoHead], ends: TargetEnds, num_proposals: int | None = None
    ) -> Filler[DominoHead]:
        return self.filler(draft, ends, DominoDecodingOptions(num_proposals=num_proposals, rollout="plain"))
