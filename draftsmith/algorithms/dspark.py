"""DSpark: a masked block whose slots are tied together by a bias from the token before, and a head that says how far to
trust them (arXiv 2607.05147).

The draft learns the target's distribution itself, so the target's final states are captured beside the taps.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from draftsmith.algorithms.block_algorithm import BlockAlgorithm
from draftsmith.algorithms.block_drafter import Filler, check_num_proposals
from draftsmith.algorithms.block_trainee import BlockOutputs
from draftsmith.algorithms.drafter import Proposals, Sampler
from draftsmith.algorithms.dspark_rollout import KeyedDSparkFiller
from draftsmith.algorithms.labelled import Chosen, HeadOptions
from draftsmith.algorithms.metrics import acceptance_metrics, calibration_metrics, label_metrics
from draftsmith.algorithms.rollout import RolloutOptions, check_vocabulary
from draftsmith.algorithms.section import DraftSection, with_head
from draftsmith.algorithms.serving import Served, Serving
from draftsmith.algorithms.trainee import Terms
from draftsmith.algorithms.weighting import DecayWeighting, FixedWeighting
from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.drafts.checks import number
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads.dspark import DSparkHead, DSparkHeadConfig, corrected_logits
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import CaptureLayout
from draftsmith.losses.teacher import TeacherLosses, cross_entropy_and_l1
from draftsmith.targets.ends import TargetEnds

# --- options --------------------------------------------------------------------------------------------------------


class DSparkObjectiveOptions(HeadOptions):
    """`draft.objective` of DSpark: the weights of the three terms (confidence_weight None: 1 where there is a
    confidence head), how labels are weighted, and how many slots go through the vocabulary at a time."""

    cross_entropy_weight: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    l1_weight: float = Field(default=0.9, ge=0, allow_inf_nan=False)
    confidence_weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    weighting: FixedWeighting = DecayWeighting(gamma=4.0)

    @model_validator(mode="after")
    def _something_is_learnt(self) -> Self:
        if self.cross_entropy_weight == 0 and self.l1_weight == 0:
            raise ValueError("cross_entropy_weight and l1_weight are both 0; the draft would learn nothing: raise one")
        return self


@with_head(DSparkHeadConfig)
class DSparkSection(DraftSection):
    """The recipe's `draft` section for DSpark. The fields of the head are those of its configuration."""

    algorithm: Literal["dspark"] = "dspark"
    objective: DSparkObjectiveOptions = DSparkObjectiveOptions()

    @model_validator(mode="after")
    def _has_what_it_weighs(self) -> Self:
        if self.objective.confidence_weight is not None and not self.value("enable_confidence_head"):
            raise ValueError(_no_confidence_head("objective.confidence_weight", self.objective.confidence_weight))
        return self


class DSparkDecodingOptions(RolloutOptions):
    """`min_survival`: proposals count while the confidence head gives them at least this chance that the verifier gets
    to them and accepts them; the rest of the block is not verified. None: all count."""

    min_survival: Annotated[float, number(above=0.0), Field(le=1)] | None = None


def _no_confidence_head(option: str, value: float) -> str:
    return f"{option} is {value}, but the draft has no confidence head; leave it out, or set enable_confidence_head"


def _without_rollout(options: DSparkDecodingOptions) -> DSparkDecodingOptions:
    """The options of a draft without a Markov head, whose steps have nothing to correct."""
    if options.rollout not in ("auto", "plain") or options.tensor_parallel:
        raise DraftsmithError(
            f"dspark: rollout is {options.rollout!r} and tensor_parallel {options.tensor_parallel}, but the draft has "
            "no Markov head (markov_rank is 0) to search with; leave both out"
        )
    return options.model_copy(update={"rollout": "plain"})


# --- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DSparkObjective:
    """sum_w w * (0.1 CE + 0.9 L1 + 1.0 BCE) / sum_w w, with the weights of the options.

    L1 = sum_v |p_draft - p_target| (not halved), p_target = softmax(head(final_state[label - 1])); the confidence
    logit's target in the BCE is the chance of acceptance 1 - L1/2, detached. A slot counts only while all earlier
    slots of its block do: nothing is ever verified behind an unverified token.
    """

    layout: BlockLayout
    options: DSparkObjectiveOptions
    confidence_weight: float | None

    def terms(self, draft: Draft[DSparkHead], ends: TargetEnds, outputs: BlockOutputs) -> Terms:
        head = draft.head
        blocks = reachable(outputs.blocks)
        hidden = self.layout.predicting(outputs.hidden, dim=2)  # [R, N, P, H]
        previous = head.markov_head.embed(blocks.previous_ids)  # [R, N, P, rank]
        latents = head.markov_head.latents(previous, hidden)  # [R, N, P, rank]
        weights = self.options.weighting.weights(blocks)  # [R, N, P]
        chosen = Chosen.labels(blocks)  # m of them
        row_weights = chosen.take(weights)

        numerator, losses = self._vocabulary_terms(draft, ends, outputs, blocks, hidden, latents, chosen, row_weights)
        acceptance = (1.0 - 0.5 * losses.l1).clamp(0.0, 1.0) * chosen.take(blocks.label_mask)  # [m]
        denominator = weights.sum()
        metrics = {
            "cross_entropy": ((row_weights * losses.cross_entropy).sum(), denominator),
            "l1": ((row_weights * losses.l1).sum(), denominator),
            **label_metrics(chosen.spread(losses.predicted_ids), blocks),
            **{f"base_{k}": v for k, v in label_metrics(chosen.spread(losses.unary_ids), blocks).items()},
            **acceptance_metrics(chosen.spread(acceptance), blocks),
        }
        if self.confidence_weight is not None:
            confidence = head.confidence(chosen.take(hidden), chosen.take(previous))  # [m]
            errors = functional.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
            confidence_loss = (row_weights * errors).sum()
            numerator = numerator + self.confidence_weight * confidence_loss
            metrics["confidence_loss"] = (confidence_loss.detach(), denominator)
            expected = chosen.spread(confidence.detach().sigmoid())
            metrics |= calibration_metrics(expected, chosen.spread(acceptance), blocks)
        metrics["loss"] = (numerator.detach(), denominator)
        return Terms(numerator, denominator, metrics)

    def _vocabulary_terms(
        self,
        draft: Draft[DSparkHead],
        ends: TargetEnds,
        outputs: BlockOutputs,
        blocks: Blocks,
        hidden: Tensor,
        latents: Tensor,
        chosen: Chosen,
        row_weights: Tensor,
    ) -> tuple[Tensor, TeacherLosses]:
        """The two terms whose tensors have the width of the vocabulary: their weighted sum, and both row by row."""
        if outputs.final_state is None:
            raise DraftsmithError("dspark learns from the target's final states, and the batch has none; capture them")
        states = outputs.final_state.flatten(0, 1)  # [R*S, H]
        row_start = torch.arange(len(outputs.final_state), device=states.device) * outputs.final_state.shape[1]
        teacher_index = chosen.take(blocks.label_index - 1 + row_start.view(-1, 1, 1))  # [m]

        def logits(hidden: Tensor, latent: Tensor, output_weight: Tensor) -> tuple[Tensor, Tensor]:
            return draft.logits(hidden, ends), functional.linear(latent, output_weight)

        def teacher_logits(part: slice) -> Tensor:
            return ends.project(states[teacher_index[part]].to(ends.head_weight.dtype))

        return cross_entropy_and_l1(
            (chosen.take(hidden), chosen.take(latents)),
            (draft.head.markov_head.output_weight,),
            logits,
            teacher_logits,
            chosen.take(torch.where(blocks.label_mask, blocks.labels, -1)),
            row_weights,
            cross_entropy_weight=self.options.cross_entropy_weight,
            l1_weight=self.options.l1_weight,
            chunk=self.options.rows_at_a_time(ends),
        )


def reachable(blocks: Blocks) -> Blocks:
    """The same blocks, without the labels that come after one without supervision."""
    return replace(blocks, label_mask=blocks.label_mask.long().cumprod(-1).bool())


# --- decoding -------------------------------------------------------------------------------------------------------


@dataclass
class DSparkFiller(Filler[DSparkHead]):
    """Left to right: each slot's logits with the bias of the token chosen before it, from which the sampler chooses.

    Whether a slot counts under `min_survival` depends on the tokens before it only, so the output does not change.
    """

    min_survival: float | None = None

    def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposals:
        """As in `Filler`, with a count where `min_survival` is set."""
        head = self.draft.head
        markov = head.markov_head
        slots = self.predicting(hidden).contiguous()  # [batch, P, H]
        unary = self.draft.logits(slots, self.ends)  # [batch, P, V]
        ids, state = anchor_ids, markov.start(markov.embed(anchor_ids))
        draws, confidence = [], []
        for slot in range(self.num_proposals):
            previous = markov.embed(ids)  # [batch, rank]
            latent, state = markov.step(state, previous, slots[:, slot])
            if self.min_survival is not None:
                confidence.append(head.confidence(slots[:, slot], previous))
            ids, q = sampler(corrected_logits(unary[:, slot], latent, markov.output_weight), slot)
            draws.append((ids, q))
        count = None
        if self.min_survival is not None:
            survival = torch.stack(confidence, dim=1).sigmoid().cumprod(-1)  # [batch, P], falling
            count = (survival >= self.min_survival).sum(-1)
        return Proposals.of_draws(draws, count)


# --- the method -----------------------------------------------------------------------------------------------------


class DSpark(BlockAlgorithm[DSparkSection, DSparkHead, DSparkDecodingOptions]):
    """One forward, then a step of the bias for each of B tokens; proposals may end where the slots' confidence does
    (`min_survival`)."""

    name = "dspark"
    head = DSparkHeadConfig
    summary = "Masked block with a bias from the token before, and a confidence for every slot"
    paper = "arXiv 2607.05147"
    section = DSparkSection
    decoding_options = DSparkDecodingOptions
    published_head: ClassVar[dict[str, Any]] = {"markov_rank": 256}
    trimming_options: ClassVar[tuple[str, ...]] = ("min_survival",)

    def head_config(self, section: DSparkSection) -> dict[str, Any]:
        said = super().head_config(section)
        # A confidence head reads the Markov embedding, if there is one, unless told otherwise.
        with_markov = said["enable_confidence_head"] and said.get("markov_rank") != 0
        return {"confidence_head_with_markov": with_markov, **said}

    def block_layout(self, config: DraftConfig) -> BlockLayout:
        return BlockLayout(BlockKind.ANCHOR_FIRST, config.block_for("dspark").size)

    def capture(self, config: DraftConfig) -> CaptureLayout:
        return replace(super().capture(config), final_state=True)

    def serving(self, config: DraftConfig) -> Serving:
        layout = self.block_layout(config)
        proposals = layout.max_proposals
        return Serving(Served("DSPARK", layout.verify_width(proposals)), Served("dspark", proposals))

    def objective(self, config: DraftConfig, section: DSparkSection) -> DSparkObjective:
        options: DSparkObjectiveOptions = section.objective
        weight = options.confidence_weight
        if DSparkHeadConfig.of(config).enable_confidence_head:
            return DSparkObjective(self.block_layout(config), options, 1.0 if weight is None else weight)
        if weight is not None:  # the checkpoint's head has none
            raise DraftsmithError(_no_confidence_head("draft.objective.confidence_weight", weight))
        return DSparkObjective(self.block_layout(config), options, None)

    def filler(self, draft: Draft[DSparkHead], ends: TargetEnds, options: DSparkDecodingOptions) -> Filler[DSparkHead]:
        if options.min_survival is not None and draft.head.confidence_head is None:
            raise DraftsmithError(_no_confidence_head("min_survival", options.min_survival))
        markov = draft.head.markov_head
        if markov.rank == 0:
            options = _without_rollout(options)
        weight = markov.output_weight
        part = check_vocabulary(self.name, draft, ends, weight, options)
        layout = self.block_layout(draft.config)
        count = check_num_proposals(options.num_proposals, layout)
        rollout = options.resolve(self.name, weight[part.first : part.last])
        if rollout == "plain":
            return DSparkFiller(draft, ends, layout, count, options.min_survival)
        return KeyedDSparkFiller.of(
            draft,
            ends,
            layout,
            count,
            part,
            pruned=rollout == "pruned",
            min_survival=options.min_survival,
        )

    def stepwise_filler(
        self, draft: Draft[DSparkHead], ends: TargetEnds, num_proposals: int | None = None
    ) -> Filler[DSparkHead]:
        return self.filler(draft, ends, DSparkDecodingOptions(num_proposals=num_proposals, rollout="plain"))
