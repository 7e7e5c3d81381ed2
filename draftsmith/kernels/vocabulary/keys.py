"""A score and a token in one int64, so that the larger key is the better token: an argmax becomes a maximum.

The high word is the fp32 score in an order that integers have too, the low word counts down from the token's id. Among
equal scores the lowest id therefore has the largest key, whatever the order in which keys are compared, and the best of
a vocabulary that is spread over programs, or over processes, is one integer maximum. Scores must not be NaN; -0 counts
as 0.
"""

import torch
from torch import Tensor

from draftsmith.kernels.triton import tl, triton

_LOW = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF

LOWEST_KEY = -(2**63)
"""Below the key of every token."""
LOWEST_KEY_IN_KERNEL = tl.constexpr(LOWEST_KEY)


def pack_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """Keys of tokens: scores fp32 and ids int64 in [0, 2^32), broadcastable -> int64."""
    scores = torch.where(scores == 0.0, 0.0, scores)
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _MAGNITUDE, bits)  # negative floats order the other way round
    return (ordered.long() << 32) | (_LOW - ids)


def new_keys(*shape: int, device: torch.device) -> Tensor:
    """Keys below every token's, int64."""
    return torch.full(shape, LOWEST_KEY, dtype=torch.int64, device=device)


def token_keys(ids: Tensor) -> Tensor:
    """`pack_keys` of tokens whose score is 0."""
    return _LOW - ids


def key_ids(keys: Tensor) -> Tensor:
    """The tokens of keys, int64."""
    return _LOW - (keys & _LOW)


def key_scores(keys: Tensor) -> Tensor:
    """The scores of keys, fp32."""
    ordered = (keys >> 32).int()
    return torch.where(ordered < 0, ordered ^ _MAGNITUDE, ordered).view(torch.float32)


@triton.jit
def pack_keys_in_kernel(scores, ids):  # type: ignore[no-untyped-def]
    """`pack_keys` of tensors in a kernel."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def key_ids_in_kernel(keys):  # type: ignore[no-untyped-def]
    """`key_ids` of tensors in a kernel."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


@triton.jit
def key_scores_in_kernel(keys):  # type: ignore[no-untyped-def]
    """`key_scores` of tensors in a kernel."""
    ordered = (keys >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
