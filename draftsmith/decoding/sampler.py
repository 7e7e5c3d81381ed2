"""How a drafter draws: from each row's own noise, under each row's own options."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decoding.rng import Stream, uniform_pair
from draftsmith.decoding.sampling import RowSampling, SamplingOptions, distribution, draw_token


@dataclass(frozen=True)
class RowSampler:
    """The `Sampler` of one step: draws from each row's own noise (seeds [batch]) at its anchor's position
    (anchors [batch])."""

    sampling: SamplingOptions | RowSampling
    seeds: Tensor
    anchors: Tensor

    @property
    def greedy(self) -> bool:
        """Whether every row takes its most likely token."""
        return self.sampling.greedy

    @property
    def temperature(self) -> Tensor:
        """Each row's temperature [batch] fp32; 0 in rows that take their most likely token."""
        if isinstance(self.sampling, RowSampling):
            return self.sampling.temperature
        return torch.full(self.anchors.shape, self.sampling.fp32_temperature, device=self.anchors.device)

    @property
    def filtered(self) -> Tensor | None:
        """Rows [batch] bool with top-k or top-p; None when there are none."""
        sampling = self.sampling
        if isinstance(sampling, SamplingOptions):
            some = not sampling.greedy and (sampling.top_k > 0 or sampling.top_p < 1.0)
            return torch.ones_like(self.anchors, dtype=torch.bool) if some else None
        if not sampling.bounds.top_k and not sampling.bounds.top_p:
            return None
        return (sampling.top_k > 0) | (sampling.top_p < 1.0)

    def __call__(self, logits: Tensor, draw: int) -> tuple[Tensor, Tensor | None]:
        """logits [batch, V] -> (ids [batch], q [batch, V], or None when all rows are greedy).

        In a batch with both kinds, a greedy row's q has all its mass on the token.
        """
        sampling = self.sampling
        if sampling.greedy:
            return logits.argmax(-1), None
        q = distribution(logits, sampling)
        ids = draw_token(q, uniform_pair(self.seeds, self.anchors, Stream.PROPOSAL, draw)[0])
        if isinstance(sampling, RowSampling) and sampling.bounds.some_greedy:
            greedy = sampling.greedy_rows
            ids = torch.where(greedy, logits.argmax(-1), ids)
            q = torch.where(greedy[:, None], torch.zeros_like(q).scatter(-1, ids[:, None], 1.0), q)
        return ids, q
