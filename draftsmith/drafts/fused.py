"""A draft's pass in decoding, in few and large kernels; `Backbone` is the reference that it equals.

Layers are those of `kernels.fused_layer`. Over all of them, the keys and values of the context are joined as well, so
that verified tokens become context by one projection and one kernel.
A block's own keys and values are written to the cache behind the context, where the next append overwrites them.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.drafts.backbone import Layer
from draftsmith.drafts.convolution import BlockConvolution
from draftsmith.drafts.draft import Draft
from draftsmith.kernels.attention.context_append import context_append
from draftsmith.kernels.attention.rope_cache import HeadNorms
from draftsmith.kernels.attention.visibility import CachePattern
from draftsmith.kernels.fused_layer import (
    Coming,
    Entries,
    FusedAttention,
    FusedConvolution,
    FusedLayer,
    FusedNorm,
    GatedMLP,
    Linear,
    Product,
)
from draftsmith.kernels.layers.joined import join_rows


class FusedDraft:
    """Runs blocks and appends context for decoding; made for a draft whose weights do not change any more.

    The draft's own parameters become views of the joined weights, so they take no memory twice; only the context's
    keys and values are projected by a copy (layers * 2 * kv_heads * d rows of H).
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        config, eps = draft.config, draft.config.rms_norm_eps
        layers = [cast(Layer, layer) for layer in draft.backbone.layers]
        with torch.no_grad():
            self.layers = [_fused(layer, config.num_attention_heads, eps) for layer in layers]
            context = [part.weight for layer in layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
            self.context_weight = torch.cat(context).detach()  # [layers * 2 * kv_heads * d, H]
            self.k_weights = torch.stack([layer.self_attn.k_norm.weight for layer in layers]).detach()
        self.context_projection = Linear(draft.backbone.fc.weight)
        self.context_norm = FusedNorm(draft.backbone.hidden_norm.weight, eps)
        self.final_norm = FusedNorm(draft.backbone.norm.weight, eps)

    def rope_table(self, length: int) -> Tensor:
        """Cosines and sines of the positions below `length`: [length, 2 * rotary] fp32."""
        cosine, sine = self.draft.backbone.rope(torch.arange(length, device=self.draft.device))
        return torch.cat((cosine, sine), dim=-1)

    def append(self, taps: Tensor, start: Tensor, cache: Tensor, rope_table: Tensor) -> None:
        """Makes features context: taps [batch, w, T*H] of the tokens at start + 0 .. w - 1, start [batch] int64; cache
        [layers, 2, batch, kv_heads, length, d]."""
        fused = self.context_projection(taps.to(self.draft.dtype))
        context, _ = self.context_norm(Coming(fused), None)
        keys_values, eps = functional.linear(context, self.context_weight), self.draft.config.rms_norm_eps
        context_append(keys_values, self.k_weights, rope_table, start, cache, eps=eps)

    def block(self, embeddings: Tensor, anchors: Tensor, cache: Tensor, rope_table: Tensor) -> Tensor:
        """Final normed states of one block a row: embeddings [batch, B, H], not scaled; anchors [batch] int64; cache as
        in `append`, into which the blocks write behind their context."""
        cosine, sine = rope_table.chunk(2, dim=-1)  # [positions, rotary]
        patterns = {kind: CachePattern(anchors, kind.causal, kind.window) for kind in self.draft.config.attention_kinds}
        coming = Coming(Product(self.draft.scaled(embeddings)))
        stream: Tensor | None = None
        for index, (layer, kind) in enumerate(zip(self.layers, self.draft.config.attention_kinds, strict=True)):
            states, stream = layer.input_norm(coming, stream)
            entries = Entries((cosine, sine), anchors, None, (cache[index, 0], cache[index, 1]), patterns[kind])
            coming, stream = layer.sublayers(states, stream, entries)
        return self.final_norm(coming, stream)[0]


def _fused(layer: Layer, heads: int, eps: float) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return FusedLayer(
        input_norm=FusedNorm(layer.input_layernorm.weight, eps),
        attention=FusedAttention(
            qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
            out=Linear(attention.o_proj.weight),
            heads=heads,
            norms=HeadNorms(attention.q_norm.weight, attention.k_norm.weight, eps),
            scale=attention.scale,
            sinks=attention.attention_sink_bias,
        ),
        mlp_norm=FusedNorm(layer.post_attention_layernorm.weight, eps),
        mlp=GatedMLP(_joined(mlp.gate_proj, mlp.up_proj), Linear(mlp.down_proj.weight), "silu"),
        attention_convolution=_convolution(layer.attention_conv),
        mlp_convolution=_convolution(layer.mlp_conv),
    )


def _joined(*projections: nn.Linear) -> Linear:
    return Linear(join_rows([projection.weight for projection in projections]))


def _convolution(module: nn.Module | None) -> FusedConvolution | None:
    if module is None:
        return None
    convolution = cast(BlockConvolution, module)
    return FusedConvolution(convolution.base_kernel, Linear(convolution.kernel_projection.weight))
