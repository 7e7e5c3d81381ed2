"""A draft's pass in decoding, in few and large kernels; `Backbone` is the reference that it equals.

Weights that read the same input are joined: queries, keys and values of a layer's block; gate and up; and, over all
layers, the keys and values of the context, so that verified tokens become context by one projection and one kernel.
A block's own keys and values are written to the cache behind the context, where the next append overwrites them.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.drafts.attention import AttentionKind
from draftsmith.drafts.backbone import Layer
from draftsmith.drafts.convolution import BlockConvolution
from draftsmith.drafts.draft import Draft
from draftsmith.kernels.attention.block_attention import block_attention
from draftsmith.kernels.attention.context_append import context_append
from draftsmith.kernels.attention.rope_cache import rope_cache
from draftsmith.kernels.layers.block_convolution import block_convolution
from draftsmith.kernels.layers.gated_activation import gated_activation
from draftsmith.kernels.layers.joined import join_rows
from draftsmith.kernels.layers.rms_norm import rms_norm
from draftsmith.kernels.layers.skinny_linear import linear_or_addends


@dataclass(frozen=True)
class FusedLayer:
    """One layer's joined weights: qkv [(heads + 2 kv_heads) * d, H], gate_up [2 I, H]; the convolutions around its
    sublayers, where it has them; the rest as in the layer."""

    layer: Layer
    kind: AttentionKind
    qkv: Tensor
    gate_up: Tensor
    attention_conv: BlockConvolution | None
    mlp_conv: BlockConvolution | None


class FusedDraft:
    """Runs blocks and appends context for decoding; made for a draft whose weights do not change any more.

    The draft's own parameters become views of the joined weights, so they take no memory twice; only the context's
    keys and values are projected by a copy (layers * 2 * kv_heads * d rows of H).
    """

    def __init__(self, draft: Draft, *, skinny: bool = True) -> None:
        """skinny: products of a few rows by `skinny_linear`, whose addends the next kernel sums."""
        self._skinny = skinny
        self.draft = draft
        config = draft.config
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        layers = [cast(Layer, layer) for layer in draft.backbone.layers]
        with torch.no_grad():
            self.layers = [
                FusedLayer(
                    layer,
                    kind,
                    qkv=_joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                    gate_up=_joined(layer.mlp.gate_proj, layer.mlp.up_proj),
                    attention_conv=cast(BlockConvolution | None, layer.attention_conv),
                    mlp_conv=cast(BlockConvolution | None, layer.mlp_conv),
                )
                for layer, kind in zip(layers, config.attention_kinds, strict=True)
            ]
            context = [part.weight for layer in layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
            self.context_weight = torch.cat(context).detach()  # [layers * 2 * kv_heads * d, H]
            self.k_weights = torch.stack([layer.self_attn.k_norm.weight for layer in layers]).detach()

    def rope_table(self, length: int) -> Tensor:
        """Cosines and sines of the positions below `length`: [length, 2 * rotary] fp32."""
        cosine, sine = self.draft.backbone.rope(torch.arange(length, device=self.draft.device))
        return torch.cat((cosine, sine), dim=-1)

    def append(self, taps: Tensor, start: Tensor, cache: Tensor, rope_table: Tensor) -> None:
        """Makes features context: taps [batch, w, T*H] of the tokens at start + 0 .. w - 1, start [batch] int64; cache
        [layers, 2, batch, kv_heads, length, d]."""
        backbone, eps = self.draft.backbone, self.draft.config.rms_norm_eps
        fused, partial = self._product(taps.to(self.draft.dtype), backbone.fc.weight)
        context, _ = rms_norm(fused, backbone.hidden_norm.weight, eps, partial=partial)
        context_append(
            functional.linear(context, self.context_weight), self.k_weights, rope_table, start, cache, eps=eps
        )

    def block(self, embeddings: Tensor, anchors: Tensor, cache: Tensor, rope_table: Tensor) -> Tensor:
        """Final normed states of one block a row: embeddings [batch, B, H], not scaled; anchors [batch] int64; cache as
        in `append`, into which the blocks write behind their context."""
        eps = self.draft.config.rms_norm_eps
        cosine, sine = rope_table.chunk(2, dim=-1)  # [positions, rotary]
        change = self.draft.scaled(embeddings)
        hidden: Tensor | None = None
        partial = False
        for index, fused in enumerate(self.layers):
            layer, attention = fused.layer, fused.layer.self_attn
            keys, values = cache[index, 0], cache[index, 1]
            normed, hidden = rms_norm(change, layer.input_layernorm.weight, eps, hidden, partial=partial)
            normed, deltas = self._before(fused.attention_conv, normed)
            q = rope_cache(
                self._product(normed, fused.qkv)[0],
                cosine,
                sine,
                anchors,
                keys,
                values,
                heads=self.heads,
                q_weight=attention.q_norm.weight,
                k_weight=attention.k_norm.weight,
                eps=eps,
            )
            mixed = block_attention(
                q,
                keys,
                values,
                anchors,
                scale=attention.scale,
                causal=fused.kind.causal,
                window=fused.kind.window,
                sinks=attention.attention_sink_bias,
            )
            mixed = mixed.transpose(1, 2).flatten(2)
            out, partial = self._after(fused.attention_conv, deltas, *self._product(mixed, attention.o_proj.weight))
            normed, hidden = rms_norm(out, layer.post_attention_layernorm.weight, eps, hidden, partial=partial)
            normed, deltas = self._before(fused.mlp_conv, normed)
            gate_up, partial = self._product(normed, fused.gate_up)
            gated = gated_activation(gate_up, "silu", normed.dtype if partial else None)
            change, partial = self._after(fused.mlp_conv, deltas, *self._product(gated, layer.mlp.down_proj.weight))
        return rms_norm(change, self.draft.backbone.norm.weight, eps, hidden, partial=partial)[0]

    def _before(
        self, convolution: BlockConvolution | None, normed: Tensor
    ) -> tuple[Tensor, tuple[Tensor, bool] | None]:
        """A sublayer's input, and the deltas of both its convolutions, as `_product` gives them."""
        if convolution is None:
            return normed, None
        deltas, partial = self._product(normed, convolution.kernel_projection.weight)
        base = convolution.base_kernel
        return block_convolution(normed, base, deltas, which=0, partial_deltas=partial), (deltas, partial)

    def _after(
        self, convolution: BlockConvolution | None, deltas: tuple[Tensor, bool] | None, out: Tensor, partial: bool
    ) -> tuple[Tensor, bool]:
        """What a sublayer adds, and whether it comes as addends."""
        if convolution is None or deltas is None:
            return out, partial
        convolved = block_convolution(
            out, convolution.base_kernel, deltas[0], which=1, partial=partial, partial_deltas=deltas[1]
        )
        return convolved, False

    def _product(self, x: Tensor, weight: Tensor) -> tuple[Tensor, bool]:
        """x W^T, and whether it comes as addends [S, ...]."""
        return linear_or_addends(x, weight, addends=self._skinny)


def _joined(*projections: nn.Linear) -> Tensor:
    return join_rows([projection.weight for projection in projections])
