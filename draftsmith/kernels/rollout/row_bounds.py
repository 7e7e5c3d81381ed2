"""Upper bounds of `base + W2 u` for every row of W2, which hold for the scores that kernels compute.

**The bound.** Let w be a row of W2, b its base logit, u the latent. A few directions Q_i and, for every row, numbers
a_i are chosen beforehand so that w is nearly the sum of a_i Q_i; r is what is left of it, and n >= |r| its stored norm.
Then, whatever Q and a are (both are rounded to bf16 before r is computed), by Cauchy-Schwarz

    w.u = sum a_i (Q_i.u) + r.u <= sum a_i (Q_i.u) + |u| n.

With no directions it would be Cauchy-Schwarz on w itself. Trained heads have a few strong ones, and most of what that
would allow lies along them.

**Rounding.** Let m >= |w| + sum |a_i| |Q_i|, also stored. A kernel's score s is b + w.u in fp32: the products of bf16
or fp16 numbers are exact (those of fp32 numbers are off by 2^-24 of themselves), and E + 1 additions, in whatever order
and with the base as first or as last term, are each off by at most 2^-22 of the sum of the magnitudes, which allows for
matrix units that truncate. That sum is at most |b| + |u| m. The bound's own sums have E + 16 terms, in fp32 without
matrix units, of magnitudes that add up to at most |u| m. So

    s <= b + sum a_i (Q_i.u) + |u| n + c (|b| + |u| m) + d,    c = (E + 16) 2^-20,    d = 2^-114.

c is more than twice what all these additions need; the rest covers second-order terms, the last few operations, and the
stored numbers, which are computed in fp64 and rounded up. d covers products of the score that underflow; those of the
bound cannot do harm, because u is scaled to a largest entry of 1 first and 2^-120 is added to n. Where a sum overflows,
|u| m does so as well; the bound is then infinite or NaN, as it is for infinite base logits, and the row counts as able
to win.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DIRECTIONS = 16
"""The strongest of a matrix, of which bounds know how far each row goes along them."""

UNDERFLOW = 2.0**-114


def slack(rank: int) -> float:
    """c of the module's docstring."""
    return (rank + 16) * 2.0**-20


class RowBounds(NamedTuple):
    """What bounds know of W2 [V, E]: directions [k, E] bf16 (Q), along [V, k] bf16 (a), beside [V] fp32 (n) and sizes
    [V] fp32 (m), where k is `DIRECTIONS`."""

    directions: Tensor
    along: Tensor
    beside: Tensor
    sizes: Tensor


@torch.no_grad()
def row_bounds(weight: Tensor) -> RowBounds:
    """The bounds' side of every row: weight [V, E]. The directions are those along which its rows are largest. Numbers
    that are not finite raise `ValueError`."""
    parts = weight.split(8192)  # a copy in fp64 of the whole would be large
    wide = _strong_directions(parts)
    lengths = wide.norm(dim=-1)
    along, beside, sizes = [], [], []
    for part in parts:
        rows = part.double()
        coefficients = (rows @ wide.T).to(torch.bfloat16)
        exact = coefficients.double()
        along.append(coefficients)
        beside.append((rows - exact @ wide).norm(dim=-1) * (1 + 2.0**-40) + 2.0**-120)
        sizes.append((rows.norm(dim=-1) + exact.abs() @ lengths) * (1 + 2.0**-40))
    directions = wide.to(torch.bfloat16)
    return RowBounds(directions, torch.cat(along), _rounded_up(torch.cat(beside)), _rounded_up(torch.cat(sizes)))


@torch.no_grad()
def share_beside(weight: Tensor) -> float:
    """Of the squares of weight [V, E], the share that does not lie along the strongest directions."""
    strengths = torch.linalg.eigvalsh(_gram(weight.split(8192))).clamp(min=0.0)
    total = float(strengths.sum())
    return float(strengths[:-DIRECTIONS].sum()) / total if total else 0.0


def _gram(parts: Sequence[Tensor]) -> Tensor:
    """W2^T W2 [E, E] fp64 of a matrix in parts [*, E]."""
    rank = parts[0].shape[1]
    gram = torch.zeros(rank, rank, dtype=torch.float64, device=parts[0].device)
    for part in parts:
        gram += part.double().T @ part.double()
    if not gram.isfinite().all():
        raise ValueError("the correction's output matrix holds numbers that are not finite")
    return gram


def _strong_directions(parts: Sequence[Tensor]) -> Tensor:
    """Directions [DIRECTIONS, E] fp64, whose numbers are bf16's, of a matrix in parts [*, E]; zeros where there are no
    more."""
    rank, device = parts[0].shape[1], parts[0].device
    found = torch.linalg.eigh(_gram(parts)).eigenvectors.T.flip(0)[:DIRECTIONS]  # the strongest first
    directions = torch.zeros(DIRECTIONS, rank, dtype=torch.float64, device=device)
    directions[: len(found)] = found.to(torch.bfloat16).double()
    return directions


def _rounded_up(numbers: Tensor) -> Tensor:
    return torch.nextafter(numbers.float(), numbers.new_tensor(float("inf"), dtype=torch.float32))


def upper_bounds(base: Tensor, bounds: RowBounds, latent: Tensor) -> Tensor:
    """What no score exceeds: base [batch, V], bounds of the matrix, latent [batch, E] -> [batch, V] fp32."""
    largest = latent.float().abs().amax(-1, keepdim=True)
    scaled = latent.float() / torch.where(largest == 0, 1.0, largest)
    length = scaled.square().sum(-1, keepdim=True).sqrt()
    along = (scaled @ bounds.directions.float().T) @ bounds.along.float().T
    reach = largest * (along + length * bounds.beside)
    wide = base.float()
    return wide + (reach + (slack(latent.shape[-1]) * (wide.abs() + length * bounds.sizes * largest) + UNDERFLOW))
