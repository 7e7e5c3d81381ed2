"""Counter-based noise in integer tensor operations: Philox 4x32-10, and Gumbel noise over a vocabulary from it.

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Triton's `tl.philox`
makes the same words.
"""

from enum import IntEnum

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
"""The largest number of 32 bits."""
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

LEAST_TEMPERATURE = 1e-30
"""Scores are divided by no temperature below this one, so that nothing overflows."""


class Stream(IntEnum):
    """What a number is for, the third word of a counter; one position uses each stream at most once for what it finally
    decides.

    `TOKEN`: the pair of one output position: the first decides which token the target draws there, the second whether a
    proposal drawn from a known distribution is accepted. `PROPOSAL`: the draws of a drafter, at the anchor's position.
    `ROW`: turns one request seed into one seed a row.
    """

    TOKEN = 0
    PROPOSAL = 1
    ROW = 2


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of noise for each counter.

    All tensors are int64 of one broadcastable shape and hold 32-bit words (0 <= word < 2^32); so do the four results.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two words wraps around in int64, which leaves all 64 bits as an unsigned product has them.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & WORD) ^ c1 ^ k0,
            second & WORD,
            ((first >> 32) & WORD) ^ c3 ^ k1,
            first & WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & WORD, (k1 + _KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def gumbel_from_words(high: Tensor, low: Tensor) -> Tensor:
    """Standard Gumbel noise from two 32-bit words (int64 tensors in [0, 2^32)) -> fp32.

    u = (high + (low + 1/2) / 2^32) / 2^32 keeps its relative precision down to 2^-65, and with it -log(1 - u), an
    exponential variable, of which the noise is minus the logarithm: tokens however unlikely are drawn as often as they
    should be.
    """
    u = high.float() * 2.0**-32 + (low.float() + 0.5) * 2.0**-64
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    exponential = torch.where(u < 0.0625, series, -torch.log((1.0 - u).clamp(min=2.0**-25)))
    return -torch.log(exponential)


def gumbel_noise(seeds: Tensor, positions: Tensor, draw: int, tokens: int, first_id: int = 0) -> Tensor:
    """Noise of tokens [first_id, first_id + tokens) in one draw of every row -> [batch, tokens] fp32.

    seeds [batch] int64 (all 64 bits count), positions [batch] int64 in [0, 2^32). The counter is (position, draw,
    `Stream.PROPOSAL`, 1 + id): the numbers of `decoding.rng.uniform_pair` have 0 there.
    """
    ids = torch.arange(first_id, first_id + tokens, device=seeds.device)
    zero = torch.zeros(len(seeds), tokens, dtype=torch.int64, device=seeds.device)
    counter = (zero + positions[:, None], zero + draw, zero + int(Stream.PROPOSAL), zero + ids + 1)
    words = philox(counter, ((seeds & WORD)[:, None], ((seeds >> 32) & WORD)[:, None]))
    return gumbel_from_words(words[0], words[1])
