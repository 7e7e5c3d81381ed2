"""DFlash 2's block on a CUDA device: the greedy path by kernels."""

import torch
from torch import Tensor

from draftsmith.algorithms.block_drafter import Filler
from draftsmith.algorithms.dflash2_path import draw_path
from draftsmith.algorithms.drafter import Proposals, Sampler
from draftsmith.drafts.heads.dflash2 import DFlash2Head
from draftsmith.kernels.rollout.candidate_path import candidate_path, top_candidates
from draftsmith.kernels.vocabulary.few_states import head_logits


class KernelDFlash2Filler(Filler[DFlash2Head]):
    """Proposes what `DFlash2Filler` does, up to rounding and to which of equal logits are the last candidates.

    When every row takes its most likely token, two kernels find the candidates and one walks through them; otherwise
    the plain path runs. The selector's sizes are within `candidate_path.fits`.
    """

    @torch.no_grad()
    def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposals:
        """As in `Filler`."""
        selector = self.draft.head.candidate_selector
        slots = self.predicting(hidden).contiguous()  # [batch, P, H]
        unary = self.draft.logits(slots, self.ends, head_logits)
        if not sampler.greedy:
            return draw_path(selector, slots, unary, anchor_ids, sampler)
        candidates = top_candidates(unary, selector.top_k)  # [batch, P, K]
        projected = selector.hidden_projection(slots)  # [batch, P, rank]
        codebooks = selector.predecessor_codebook, selector.successor_codebook
        return Proposals(candidate_path(candidates, anchor_ids.contiguous(), projected, *codebooks))
