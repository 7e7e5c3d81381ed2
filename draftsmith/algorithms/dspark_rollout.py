"""DSpark's block filled by keys. With a vanilla Markov head a step is one search, whose latent is a table's row of the
token before."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.algorithms.block_drafter import Filler
from draftsmith.algorithms.drafter import Proposals, Sampler
from draftsmith.algorithms.rollout import VocabularyPart
from draftsmith.algorithms.search import Search
from draftsmith.blocks.layout import BlockLayout
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads.dspark import DSparkHead
from draftsmith.kernels.vocabulary.few_states import head_logits
from draftsmith.kernels.vocabulary.keys import key_ids
from draftsmith.targets.ends import TargetEnds


@dataclass
class KeyedDSparkFiller(Filler[DSparkHead]):
    """Fills the block left to right, each step from the key that the step before left in device memory.

    part_ends: the target's ends for the tokens that `search` covers; min_survival as for the plain filler.
    """

    part_ends: TargetEnds
    search: Search
    min_survival: float | None = None

    @classmethod
    def of(
        cls,
        draft: Draft[DSparkHead],
        ends: TargetEnds,
        layout: BlockLayout,
        num_proposals: int,
        part: VocabularyPart,
        *,
        pruned: bool,
        min_survival: float | None,
    ) -> "KeyedDSparkFiller":
        """The filler over this part of the vocabulary; computes the bounds of W2's rows."""
        head = draft.head
        search = Search.of(lambda: head.markov_head.output_weight, part, pruned=pruned)
        if search.bounds is not None:
            search.bounds()
        return cls(draft, ends, layout, num_proposals, part.ends(ends), search, min_survival)

    @torch.no_grad()
    def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposals:
        """As in `Filler`, with a count where `min_survival` is set."""
        head = self.draft.head
        markov = head.markov_head
        slots = self.predicting(hidden).contiguous()  # [batch, P, H]
        base = self.draft.logits(slots, self.part_ends, head_logits)
        block = self.search.block(base, anchor_ids, sampler)
        state = slots.new_zeros(slots.shape[0], markov.rank)
        for step in range(self.num_proposals):
            if markov.latent_is_embedding:
                block.choose(step, markov.markov_w1.weight, of_previous=True)
            else:
                previous = markov.embed(key_ids(block.keys[step]))  # [batch, rank]
                latent, state = markov.step(state, previous, slots[:, step])
                block.choose(step, latent.contiguous())
        token_ids = block.token_ids()
        return Proposals(token_ids, block.distributions(), self._count(slots, anchor_ids, token_ids))

    def _count(self, slots: Tensor, anchor_ids: Tensor, token_ids: Tensor) -> Tensor | None:
        if self.min_survival is None:
            return None
        head = self.draft.head
        previous = torch.cat((anchor_ids[:, None], token_ids[:, :-1]), dim=1)  # [batch, P]
        survival = head.confidence(slots, head.markov_head.embed(previous)).sigmoid().cumprod(-1)
        return (survival >= self.min_survival).sum(-1)
