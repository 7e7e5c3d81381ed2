"""Which proposals stand, and what the target says instead: pure functions of tensors (Leviathan et al., 2211.17192)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decoding.sampling import draw_token
from draftsmith.kernels.state.commit import prefix_length


@dataclass(frozen=True)
class Verdict:
    """What one verify of width w = P + 1 commits.

    token_ids [batch, w] int64: the accepted proposals, then the target's own token; entries from `count` on mean
    nothing. count [batch] int64, 1 <= count <= w: accepted proposals + 1.
    """

    token_ids: Tensor
    count: Tensor


def verify_chosen(chosen: Tensor, proposed: Tensor, proposed_count: Tensor | None) -> Verdict:
    """Deterministic proposals, greedy or sampled: accept as long as the target chooses the same token.

    chosen [batch, P + 1] int64: the target's own token at every verify position, its argmax or one draw from its
    distribution p. proposed [batch, P] int64; proposed_count [batch] int64 or None: how many of them are proposed at
    all.

    For a draw y ~ p the proposal x is accepted when y = x, which happens with probability p(x); otherwise y is
    distributed as p without x. That is the rule of speculative sampling (arXiv 2211.17192) for deterministic proposals;
    beyond it, with noise that belongs to the position, the output is the very one of plain sampling with the same
    seed.
    """
    accepted = prefix_length(chosen[:, :-1] == proposed, proposed_count)
    return Verdict(chosen, accepted + 1)


def verify_sampled(
    p: Tensor, proposed: Tensor, q: Tensor, proposed_count: Tensor | None, uniform: Tensor, accept_uniform: Tensor
) -> Verdict:
    """Proposals drawn from a known q (Leviathan et al., 2211.17192): accept x with min(1, p(x)/q(x)); after the first
    rejection draw from (p - q)+ renormalised, after the last proposal from p.

    p [batch, P + 1, V], q [batch, P, V]: probabilities; proposed [batch, P] int64; uniform and accept_uniform [batch,
    P + 1] fp64 in [0, 1), independent, and independent of the numbers that drew `proposed`. Positions from
    proposed_count [batch] on count as not proposed: their token is drawn from p. Whether a position is proposed must
    not depend on the token drawn for it, only on earlier ones; else the output would not follow p.
    """
    proposals = proposed.shape[1]
    # Both are normalised in fp64, so that mass of (p - q)+ comes from their difference and not from rounded sums.
    p_sum, q_sum = p.sum(-1, dtype=torch.float64), q.sum(-1, dtype=torch.float64)
    p_of = p[:, :proposals].gather(-1, proposed.unsqueeze(-1)).squeeze(-1) / p_sum[:, :proposals]  # [batch, P]
    q_of = q.gather(-1, proposed.unsqueeze(-1)).squeeze(-1) / q_sum
    accepted = prefix_length(accept_uniform[:, :proposals] * q_of < p_of, proposed_count)

    count = torch.full_like(accepted, proposals) if proposed_count is None else proposed_count.clamp(max=proposals)
    rejected = accepted < count
    p_here = _at(p, p_sum, accepted)  # [batch, V]
    residual = (p_here - _at(q, q_sum, accepted.clamp(max=proposals - 1))).clamp(min=0.0)
    # A rejection means p(x) < q(x), so some other token has p > q; only rounding can leave nothing there.
    has_residual = rejected & (residual.sum(-1) > 0)
    last = draw_token(
        torch.where(has_residual.unsqueeze(-1), residual, p_here), uniform.gather(1, accepted[:, None])[:, 0]
    )

    token_ids = torch.cat((proposed, proposed[:, :1]), dim=1)  # [batch, P + 1]
    return Verdict(token_ids.scatter(1, accepted[:, None], last[:, None]), accepted + 1)


def _at(weights: Tensor, sums: Tensor, index: Tensor) -> Tensor:
    """weights [batch, n, V] / sums [batch, n] at index [batch] of dimension 1 -> [batch, V] fp64."""
    chosen = weights.gather(1, index.view(-1, 1, 1).expand(-1, 1, weights.shape[-1])).squeeze(1)
    return chosen.double() / sums.gather(1, index[:, None])
