"""DFlash 2's block filled by PyTorch operations: a path through the candidates of the slots, left to right."""

from torch import Tensor

from draftsmith.algorithms.block_drafter import Filler
from draftsmith.algorithms.drafter import Proposals, Sampler
from draftsmith.drafts.heads.dflash2 import CandidateSelector, DFlash2Head


def draw_path(
    selector: CandidateSelector, slots: Tensor, unary: Tensor, anchor_ids: Tensor, sampler: Sampler
) -> Proposals:
    """A path through the slots' candidates, left to right: slots [batch, P, H], unary [batch, P, V]."""
    # In order of ids, as a vocabulary is: ties go to the lowest one, and a draw's inverse CDF runs as over all tokens.
    candidates = selector.candidates(unary).sort(-1).values  # [batch, P, K]
    draws, ids = [], anchor_ids
    for slot in range(slots.shape[1]):
        offered = candidates[:, slot]
        chosen, q = sampler(selector.scores(unary[:, slot], selector.latent(slots[:, slot], ids), offered), slot)
        ids = offered.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        everywhere = None if q is None else q.new_zeros(unary[:, slot].shape).scatter(-1, offered, q)
        draws.append((ids, everywhere))
    return Proposals.of_draws(draws)


class DFlash2Filler(Filler[DFlash2Head]):
    """A path through the slots' candidates: each token is the best of the selector's scores given the token before it,
    or drawn from them. All other tokens have probability 0."""

    def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposals:
        """As in `Filler`."""
        slots = self.predicting(hidden)  # [batch, P, H]
        return draw_path(
            self.draft.head.candidate_selector, slots, self.draft.logits(slots, self.ends), anchor_ids, sampler
        )
