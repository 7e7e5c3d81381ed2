"""The recurrences of `kernels.recurrent.recurrence` over a long text, in chunks of matrix products.

Within a chunk of C tokens let G_i be the sum of the log decays up to token i. The delta rule's corrections depend on
each other: u = (I + A)^-1 (b v - b exp(G) k S), with A_ij = b_i exp(G_i - G_j) <k_i, k_j> for j < i, is what each token
really adds (the WY form of arXiv 2406.06484, with decays as in arXiv 2412.06464).
"""

import torch
from torch import Tensor

CHUNK = 64
CHANNEL_CHUNK = 16
"""With a decay for every channel the exponents of a chunk are [C, C, key_dim] numbers, so that none overflows."""


def chunked_recurrence(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [slots, w, heads, value_dim] float32, and the states after the last token.

    query (scaled) and key [slots, w, heads, key_dim] float32; value [slots, w, heads, value_dim]; log_decay [slots, w,
    heads] or [slots, w, heads, key_dim]; rate [slots, w, heads] or None; state [slots, heads, key_dim, value_dim].
    """
    width = value.shape[1]
    by_channel = log_decay.dim() == 4
    chunk = CHANNEL_CHUNK if by_channel else CHUNK
    out = []
    for begin in range(0, width, chunk):
        part = slice(begin, min(begin + chunk, width))
        decay = log_decay[:, part].transpose(1, 2).float()  # [slots, heads, C(, key_dim)]
        one, state = _chunk(
            query[:, part].transpose(1, 2),
            key[:, part].transpose(1, 2),
            value[:, part].transpose(1, 2).float(),
            decay if by_channel else decay[..., None],
            None if rate is None else rate[:, part].transpose(1, 2),
            state,
        )
        out.append(one.transpose(1, 2))
    return torch.cat(out, dim=1), state


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk, all [slots, heads, C, ...]; decay [slots, heads, C, key_dim or 1], rate [slots, heads, C]."""
    total = decay.cumsum(2)  # G
    count = total.shape[2]
    earlier = torch.ones(count, count, dtype=torch.bool, device=total.device).tril(-1)
    itself = torch.eye(count, dtype=torch.bool, device=total.device)
    # exp(G_i - G_j) for j <= i, which is at most 1; what lies above the diagonal would overflow.
    between = total[:, :, :, None] - total[:, :, None]  # [slots, heads, C, C, key_dim or 1]
    between = between.masked_fill(~(earlier | itself)[..., None], -torch.inf)
    between = between.exp()
    if between.shape[-1] == 1:
        pairs, seen = between[..., 0] * (key @ key.mT), between[..., 0] * (query @ key.mT)
    else:
        pairs = torch.einsum("bhik,bhjk,bhijk->bhij", key, key, between)
        seen = torch.einsum("bhik,bhjk,bhijk->bhij", query, key, between)
    from_start = total.exp()
    added = value
    if rate is not None:
        factors = (pairs * rate[..., None]).masked_fill(~earlier, 0) + itself.float()
        wanted = rate[..., None] * (value - (from_start * key) @ state)
        added = torch.linalg.solve_triangular(factors, wanted, upper=False, unitriangular=True)
    out = (query * from_start) @ state + seen @ added
    to_end = (total[:, :, -1:] - total).exp()
    return out, state * from_start[:, :, -1].unsqueeze(-1) + (to_end * key).mT @ added
