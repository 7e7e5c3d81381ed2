"""From logits to the distribution that a request asks for, and from a distribution to a token."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen: temperature, then top-k, then top-p, then renormalised (methods.md section 6.3).

    `temperature` 0 means greedy (the most likely token, ties to the lowest id); `top_k` 0 and `top_p` 1 mean off.
    Raises `DraftsmithError` for values outside temperature >= 0, top_k >= 0, 0 < top_p <= 1. Greedy decoding takes the
    most likely token, which no top-k or top-p removes, so they change nothing there.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0.0 <= self.temperature < math.inf:
            raise DraftsmithError(f"temperature is {self.temperature!r}; it needs a number >= 0 (0 is greedy)")
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise DraftsmithError(f"top_p is {self.top_p!r}; it needs a number in (0, 1] (1 is off)")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise DraftsmithError(f"top_k is {self.top_k!r}; it needs an integer >= 0 (0 is off)")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken and nothing is drawn."""
        return self.temperature == 0.0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def distribution(logits: Tensor, options: SamplingOptions) -> Tensor:
    """The sampled distribution: logits [..., V] of any float dtype -> probabilities [..., V] fp32, summing to 1.

    Top-k keeps every token whose logit is at least the k-th largest (tied ones all stay, so that the result does not
    depend on how a sort breaks ties). Top-p keeps the most likely tokens until their mass reaches top_p: a token stays
    when the mass before it is below top_p, so the most likely one always stays. `options` must not be greedy.
    """
    scores = logits.float()
    if 0 < options.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(options.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest_kept, -math.inf)
    # Relative to the largest, the quotient by a tiny temperature is 0 or falls towards -inf, where it could overflow.
    # A temperature that fp32 has no number for would give 0 / 0 or inf / inf; the nearest that it has means the same.
    fp32 = torch.finfo(torch.float32)
    temperature = min(max(options.temperature, fp32.tiny), fp32.max)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    probabilities = scores.softmax(-1)
    if options.top_p < 1.0:
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.double().cumsum(-1) - ordered
        dropped = torch.empty_like(ids, dtype=torch.bool).scatter_(-1, ids, mass_before >= options.top_p)
        probabilities = probabilities.masked_fill(dropped, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def draw_token(weights: Tensor, uniform: Tensor) -> Tensor:
    """One token a row by inverse CDF: weights [..., V] >= 0 (need not sum to 1), uniform [...] in [0, 1) fp64 -> [...].

    The inverse CDF takes one number a draw where Gumbel-max takes a vocabulary of them, and it is monotone in that
    number. Sums are in fp64: over 150k tokens fp32 would lose the tail. A token of weight 0 is never drawn.
    """
    cumulative = weights.double().cumsum(-1)
    threshold = uniform.unsqueeze(-1) * cumulative[..., -1:]
    return ((cumulative > threshold) & (weights > 0)).to(torch.uint8).argmax(-1)
