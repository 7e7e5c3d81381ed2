"""From logits to the distribution that a request asks for, and from a distribution to a token."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from pydantic import ValidationError
from torch import Tensor

from draftsmith.decoding.options import SamplingFields
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.vocabulary.noise import LEAST_TEMPERATURE


class SamplingOptions(SamplingFields):
    """How the tokens of a request are chosen. Raises `DraftsmithError` for values out of range."""

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0) -> None:
        try:
            super().__init__(temperature=temperature, top_p=top_p, top_k=top_k)
        except ValidationError as error:
            faults = (
                f"{fault['loc'][0]} is {fault['input']!r}; {fault['msg'].removeprefix('Value error, ')}"
                for fault in error.errors(include_url=False)
            )
            raise DraftsmithError("\n".join(faults)) from None

    @classmethod
    def of(cls, section: SamplingFields) -> "SamplingOptions":
        """Those that a section says."""
        return cls(section.temperature, section.top_p, section.top_k)

    # Every step compares its rows' options: these take a fraction of the time of pydantic's own.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingOptions):
            return NotImplemented
        return self is other or self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    @property
    def _values(self) -> tuple[float, float, int]:
        return self.temperature, self.top_p, self.top_k

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken and nothing is drawn."""
        return self.temperature == 0.0

    @property
    def fp32_temperature(self) -> float:
        """The temperature in the range of fp32. One that fp32 has no number for would give 0 / 0 or inf / inf; the
        nearest that can be divided by means the same."""
        return 0.0 if self.greedy else min(max(self.temperature, LEAST_TEMPERATURE), torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class SamplingBounds:
    """What the host knows of the options of a batch of rows; a step's shapes and kernels may depend on it.

    greedy: all rows are; some_greedy: at least one is; top_k: at least every row's, and a power of two, or 0 when none
    has one; top_p: at least one row has one. Rows that go beyond none of the bounds give the same results under any.
    """

    greedy: bool = True
    some_greedy: bool = True
    top_k: int = 0
    top_p: bool = False

    @classmethod
    def of(cls, options: Iterable[SamplingOptions]) -> "SamplingBounds":
        """The bounds of these rows' options."""
        rows = set(options)
        drawn = {row for row in rows if not row.greedy}
        top_k = max((row.top_k for row in drawn), default=0)
        return cls(
            greedy=not drawn,
            some_greedy=len(drawn) < len(rows) or not rows,
            top_k=0 if top_k == 0 else 1 << (top_k - 1).bit_length(),
            top_p=any(row.top_p < 1.0 for row in drawn),
        )


@dataclass(frozen=True)
class RowSampling:
    """Sampling options of each row, on the device: temperature [batch] fp32 (0: greedy, which no other temperature is
    rounded to), top_k [batch] int64 (0: off), top_p [batch] fp64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    bounds: SamplingBounds

    @classmethod
    def of(cls, options: Sequence[SamplingOptions], device: torch.device | str = "cpu") -> "RowSampling":
        """One entry a row."""
        return cls(
            temperature=torch.tensor([row.fp32_temperature for row in options], device=device),
            top_k=torch.tensor([row.top_k for row in options], dtype=torch.int64, device=device),
            top_p=torch.tensor([row.top_p for row in options], dtype=torch.float64, device=device),
            bounds=SamplingBounds.of(options),
        )

    @property
    def greedy(self) -> bool:
        """Whether every row takes its most likely token."""
        return self.bounds.greedy

    @property
    def greedy_rows(self) -> Tensor:
        """[batch] bool."""
        return self.temperature == 0


def distribution(logits: Tensor, options: SamplingOptions | RowSampling) -> Tensor:
    """The sampled distribution: logits [batch, ..., V] of any float dtype -> probabilities of that shape, fp32,
    summing to 1.

    Top-k keeps every token whose logit is at least the k-th largest (tied ones all stay, so that the result does not
    depend on how a sort breaks ties). Top-p keeps the most likely tokens until their mass reaches top_p: a token stays
    when the mass before it is below top_p, so the most likely one always stays. One set of options for all rows (not
    greedy), or one a row: then a row's result depends on its own options only, and a greedy row's means nothing.
    """
    if isinstance(options, SamplingOptions):
        options = RowSampling.of([options], logits.device)
    scores, bounds = logits.float(), options.bounds
    vocab_size = scores.shape[-1]

    def column(values: Tensor) -> Tensor:
        return values.view(-1, *[1] * (scores.dim() - 1))  # [batch, 1, ..., 1]

    if bounds.top_k:
        top_k = column(options.top_k)
        largest = scores.topk(min(bounds.top_k, vocab_size), dim=-1).values
        place = (top_k - 1).clamp(0, largest.shape[-1] - 1).expand(*scores.shape[:-1], 1)
        limited = (top_k > 0) & (top_k < vocab_size)
        scores = scores.masked_fill((scores < largest.gather(-1, place)) & limited, -math.inf)
    # Relative to the largest, the quotient by a tiny temperature is 0 or falls towards -inf, where it could overflow.
    temperature = column(options.temperature).clamp(min=LEAST_TEMPERATURE)  # greedy rows: 0
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    probabilities = scores.softmax(-1)
    if bounds.top_p:
        top_p = column(options.top_p)
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.double().cumsum(-1) - ordered
        dropped = torch.empty_like(ids, dtype=torch.bool).scatter_(-1, ids, mass_before >= top_p)
        kept = probabilities.masked_fill(dropped, 0.0)
        probabilities = torch.where(top_p < 1.0, kept / kept.sum(-1, keepdim=True), probabilities)
    return probabilities


def draw_token(weights: Tensor, uniform: Tensor) -> Tensor:
    """One token a row by inverse CDF: weights [..., V] >= 0 (need not sum to 1), uniform [...] in [0, 1) fp64 -> [...].

    The inverse CDF takes one number a draw where Gumbel-max takes a vocabulary of them, and it is monotone in that
    number. Sums are in fp64: over 150k tokens fp32 would lose the tail. A token of weight 0 is never drawn.
    """
    cumulative = weights.double().cumsum(-1)
    threshold = uniform.unsqueeze(-1) * cumulative[..., -1:]
    return ((cumulative > threshold) & (weights > 0)).to(torch.uint8).argmax(-1)
