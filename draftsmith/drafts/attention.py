"""How a draft layer asks for attention: block queries over [context; own block], whoever computes it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class AttentionKind:
    """One layer's pattern: `window` None for full layers, else W (context >= query position - (W-1) is visible);
    `causal` says whether slots of a block see only earlier slots (and themselves)."""

    window: int | None
    causal: bool


class BlockAttention(Protocol):
    """Attention of block slots over the context and their own block.

    Built once per forward by whoever knows the geometry (training from document ids and anchors, the engine from
    per-row lengths) and used by every layer. q [R, heads, N*B, d]; context_k/v [R, kv_heads, S, d];
    block_k/v [R, kv_heads, N*B, d]; sinks [heads] logits of a per-head attention sink, or None. Returns [R, heads, N*B, d].
    """

    def __call__(
        self,
        q: Tensor,
        context_k: Tensor,
        context_v: Tensor,
        block_k: Tensor,
        block_v: Tensor,
        *,
        kind: AttentionKind,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor: ...
