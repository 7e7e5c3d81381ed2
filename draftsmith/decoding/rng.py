"""Uniform noise as a pure function of (row seed, position, stream, draw): Philox 4x32-10 in integer tensor operations.

There is no generator state. A row's noise therefore does not depend on its neighbours in the batch, on how many tokens
a step commits or on the device; a fixed seed repeats; and a CUDA graph or a kernel (Triton's `tl.philox`) can make the
same numbers. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.vocabulary.noise import WORD, Stream, philox

__all__ = ["Stream", "row_seeds", "uniform_pair"]


def uniform_pair(seeds: Tensor, positions: Tensor, stream: Stream, draw: int = 0) -> tuple[Tensor, Tensor]:
    """Two independent uniform numbers in [0, 1) for each position, in steps of 2^-53.

    seeds int64 (all 64 bits count) and positions int64 in [0, 2^32), broadcastable; `draw` in [0, 2^32) numbers further
    draws at the same position. Returns two fp64 tensors of the broadcast shape.
    """
    words = _words(seeds, positions, stream, draw)
    return _to_unit(words[0], words[1]), _to_unit(words[2], words[3])


def row_seeds(seed: int, rows: int) -> list[int]:
    """One seed a row, in [0, 2^63), from a request's seed in [0, 2^63): row i's depends on `seed` and i only."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise DraftsmithError(f"seed is {seed!r}; it needs an integer in [0, 2^63)")
    words = _words(torch.tensor(seed), torch.arange(rows), Stream.ROW, 0)
    return (((words[0] << 32) | words[1]) & (2**63 - 1)).tolist()


def _words(seeds: Tensor, positions: Tensor, stream: Stream, draw: int) -> tuple[Tensor, ...]:
    seeds, positions = torch.broadcast_tensors(seeds, positions)
    zero = torch.zeros_like(positions)
    return philox((positions, zero + draw, zero + int(stream), zero), (seeds & WORD, (seeds >> 32) & WORD))


def _to_unit(high: Tensor, low: Tensor) -> Tensor:
    """53 bits of two words as a number in [0, 1)."""
    return (((high >> 5) << 26) | (low >> 6)).to(torch.float64) * 2.0**-53
