"""DFlash: a block of masked slots, each predicted by itself in one forward (arXiv 2602.06036)."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from pydantic import Field
from torch import Tensor

from draftsmith.algorithms.block_algorithm import BlockAlgorithm
from draftsmith.algorithms.block_drafter import Filler, check_num_proposals
from draftsmith.algorithms.block_trainee import BlockOutputs
from draftsmith.algorithms.drafter import Proposals, Sampler
from draftsmith.algorithms.labelled import HeadOptions
from draftsmith.algorithms.metrics import label_metrics
from draftsmith.algorithms.options import DecodingOptions
from draftsmith.algorithms.sampled_vocabulary import SampledVocabulary
from draftsmith.algorithms.section import DraftSection
from draftsmith.algorithms.trainee import Terms
from draftsmith.algorithms.weighting import DecayWeighting, Weighting
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads.dflash import DFlashHeadConfig
from draftsmith.losses.linear_cross_entropy import linear_cross_entropy
from draftsmith.targets.ends import TargetEnds


class DFlashObjectiveOptions(HeadOptions):
    """`draft.objective` of DFlash: how labels are weighted, and how many slots go through the output head at a time
    (None: half a GiB of logits).

    `negatives`: training's softmax runs over the labels of a micro-batch and so many other tokens drawn at random,
    instead of the whole vocabulary (None): for CPUs, where the head costs more than a small draft. Evaluation is always
    whole.
    """

    weighting: Weighting = DecayWeighting()
    negatives: int | None = Field(default=None, ge=1)


class PlainSection(DraftSection):
    """What the sections of methods without a head of their own share."""

    objective: DFlashObjectiveOptions = DFlashObjectiveOptions()


class DFlashSection(PlainSection):
    """The recipe's `draft` section for DFlash."""

    algorithm: Literal["dflash"] = "dflash"


@dataclass(frozen=True)
class DFlashObjective:
    """Weighted cross-entropy of the predicting slots: sum(w * CE) over the weighting's own denominator."""

    layout: BlockLayout
    options: DFlashObjectiveOptions

    def terms(self, draft: Draft[None], ends: TargetEnds, outputs: BlockOutputs) -> Terms:
        blocks = outputs.blocks
        hidden = self.layout.predicting(outputs.hidden, dim=2)  # [R, N, P, H]
        project, labels = partial(draft.logits, ends=ends), blocks.labels
        sample: SampledVocabulary | None = None
        if self.options.negatives is not None and draft.training:
            sample = SampledVocabulary.draw(labels[blocks.label_mask], ends, self.options.negatives)
            project, labels = partial(sample.logits, draft=draft), sample.index(labels)
        losses, predicted = linear_cross_entropy(
            hidden,
            project,
            labels,
            blocks.label_mask,
            chunk=self.options.rows_at_a_time(ends),
            max_labels=blocks.max_labels,
        )  # [R, N, P]
        if sample is not None:
            predicted = sample.token_ids[predicted]
        numerator, denominator = self.options.weighting.weighted(losses, blocks)
        metrics = {"loss": (numerator.detach(), denominator), **label_metrics(predicted, blocks)}
        return Terms(numerator, denominator, metrics)


class DFlashFiller(Filler[None]):
    """Each slot's most likely token, ties to the lowest id. Deterministic also when the request samples: slots know
    nothing of each other, and tokens drawn independently would rarely fit together."""

    def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposals:
        """As in `Filler`; slot 0 has read the anchor, which is not needed again."""
        return Proposals(self.draft.argmax(self.predicting(hidden), self.ends))


class StepwiseDFlashFiller(Filler[None]):
    """Each slot's token by the sampler, from its own logits: for a greedy sampler what `DFlashFiller` proposes."""

    def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposals:
        """As in `Filler`."""
        logits = self.draft.logits(self.predicting(hidden), self.ends)  # [batch, P, V]
        return Proposals.of_draws([sampler(logits[:, slot], slot) for slot in range(self.num_proposals)])


PlainT = TypeVar("PlainT", bound=PlainSection)


class PlainBlocks(BlockAlgorithm[PlainT, None, DecodingOptions]):
    """One forward proposes a block's B-1 tokens; no head of its own, and no decoding options."""

    head = DFlashHeadConfig

    def block_layout(self, config: DraftConfig) -> BlockLayout:
        return BlockLayout(BlockKind.ANCHOR_KNOWN, config.block_for(self.name).size)

    def objective(self, config: DraftConfig, section: PlainT) -> DFlashObjective:
        return DFlashObjective(self.block_layout(config), section.objective)

    def replayable(self, section: PlainT) -> bool:
        """Sampled vocabularies have a size that the device decides."""
        return section.objective.negatives is None

    def filler(self, draft: Draft[None], ends: TargetEnds, options: DecodingOptions) -> DFlashFiller:
        layout = self.block_layout(draft.config)
        return DFlashFiller(draft, ends, layout, check_num_proposals(options.num_proposals, layout))

    def stepwise_filler(
        self, draft: Draft[None], ends: TargetEnds, num_proposals: int | None = None
    ) -> StepwiseDFlashFiller:
        layout = self.block_layout(draft.config)
        return StepwiseDFlashFiller(draft, ends, layout, check_num_proposals(num_proposals, layout))


class DFlash(PlainBlocks[DFlashSection]):
    """Every slot of a training block but the anchor's is masked."""

    name = "dflash"
    summary = "Masked block, every slot predicted at once by itself"
    paper = "arXiv 2602.06036"
    section = DFlashSection
