"""DFlash 2's block on a CUDA device: the greedy path by kernels."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from draftsmith.algorithms.algorithm import Proposals, TokenSampler
from draftsmith.algorithms.dflash2 import draw_path, selector_of
from draftsmith.algorithms.rollout import KeyedSampler
from draftsmith.algorithms.search import base_logits
from draftsmith.blocks.layout import BlockLayout
from draftsmith.drafts.draft import Draft
from draftsmith.kernels.rollout.candidate_path import candidate_path, top_candidates
from draftsmith.targets.ends import TargetEnds


@dataclass
class KernelDFlash2Proposer:
    """Proposes what `DFlash2Proposer` does, up to rounding and to which of equal logits are the last candidates.

    When every row takes its most likely token, two kernels find the candidates and one walks through them; otherwise
    the plain path runs. The selector's sizes are within `candidate_path.fits`.
    """

    draft: Draft
    ends: TargetEnds
    layout: BlockLayout
    num_proposals: int

    @torch.no_grad()
    def propose(self, hidden: Tensor, anchor_ids: Tensor, sampler: TokenSampler) -> Proposals:
        """hidden [batch, B, H], anchor_ids [batch] -> token_ids [batch, P], with q [batch, P, V] when sampling."""
        selector = selector_of(self.draft)
        slots = self.layout.predicting(hidden, dim=1)[:, : self.num_proposals].contiguous()  # [batch, P, H]
        unary = base_logits(self.draft, slots, self.ends, kernels=True)
        if not cast(KeyedSampler, sampler).greedy:
            return draw_path(selector, slots, unary, anchor_ids, sampler)
        candidates = top_candidates(unary, selector.top_k)  # [batch, P, K]
        projected = selector.hidden_projection(slots)  # [batch, P, rank]
        codebooks = selector.predecessor_codebook, selector.successor_codebook
        return Proposals(candidate_path(candidates, anchor_ids.contiguous(), projected, *codebooks))
