"""How a draft layer asks for attention: block queries over [context; own block], whoever computes it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class AttentionKind:
    """One layer's pattern, as `kernels.attention.visibility` reads it: `window` None for full layers, else W (only keys
    nearer than W positions are visible); `causal` says whether slots of a block see only earlier slots (and
    themselves)."""

    window: int | None
    causal: bool


@dataclass(frozen=True)
class AttentionInputs:
    """What a layer asks attention of block slots for: q [R, heads, N*B, d]; keys and values of the context [R,
    kv_heads, S, d] and of the slots [R, kv_heads, N*B, d]; sinks [heads], logits of a per-head attention sink, or
    None."""

    q: Tensor
    context_k: Tensor
    context_v: Tensor
    block_k: Tensor
    block_v: Tensor
    kind: AttentionKind
    scale: float
    sinks: Tensor | None

    def joined(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the context and then of the slots [R, kv_heads, S+N*B, d]."""
        return (
            torch.cat((self.context_k, self.block_k), dim=2),
            torch.cat((self.context_v, self.block_v), dim=2),
        )


class BlockAttention(Protocol):
    """Attention of block slots over the context and their own block: -> [R, heads, N*B, d].

    Built once per forward by whoever knows the geometry (training from document ids and anchors, the engine from
    per-row lengths) and used by every layer.
    """

    def __call__(self, inputs: AttentionInputs) -> Tensor: ...


class DenseBlockAttention:
    """Attention under explicit masks: the plain way, for CPU training, decoding and as the reference of faster ways.

    `masks` maps each layer's pattern to a bool tensor broadcastable to [R, 1, N*B, S+N*B], True where the query (a
    block slot) sees the key (first the S context tokens, then the N*B slots). A slot always sees itself, so no row is
    empty.
    """

    def __init__(self, masks: dict[AttentionKind, Tensor]) -> None:
        self.masks = masks

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Raises `DraftsmithError` when there is no mask for the inputs' kind."""
        q, kind, scale, sinks = inputs.q, inputs.kind, inputs.scale, inputs.sinks
        if kind not in self.masks:
            raise DraftsmithError(f"no attention mask for layers of {kind}; masks were built for {list(self.masks)}")
        keys, values = inputs.joined()
        rows, heads, queries, head_dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        # Query heads that share a key head become more queries of that head: keys and values need not be repeated.
        grouped = q.reshape(rows, kv_heads, group * queries, head_dim)
        visible = self.masks[kind].expand(-1, -1, queries, keys.shape[2]).repeat(1, 1, group, 1)
        if sinks is None:
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scale)
        else:
            per_query = sinks.view(1, kv_heads, group, 1, 1).expand(rows, -1, -1, queries, 1).flatten(2, 3)
            mixed = _attend_with_sinks(grouped, keys, values, visible, per_query, scale)
        return mixed.reshape(rows, heads, queries, head_dim)


def _attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Softmax over the visible keys and one more column, the head's sink, which has weight but no value.

    q [R, heads, Q, d], k and v [R, heads, K, d], visible [R or 1, 1, Q, K] bool, sinks [R, heads, Q, 1] logits.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = torch.cat((scores, sinks.to(dtype)), dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ v.to(dtype)).to(v.dtype)


def with_sinks(mixed: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention's output mixed [R, heads, Q, d] as it is with sinks [heads]; lse [R, heads, Q] fp32, the natural
    logarithm of the softmax's denominator without them.

    One more column in the softmax, with weight exp(sink) and no value, shrinks the output by what it takes.
    """
    kept = torch.sigmoid(lse - sinks.float().view(1, -1, 1))  # [R, heads, Q]
    return (mixed * kept.unsqueeze(-1)).to(mixed.dtype)
