"""A draft's forward pass written out slot by slot in fp64, from the equations alone; slow and for comparison only."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.drafts.draft import Draft

Sees = Callable[[int, int, int, int], bool]
"""(row, layer, query slot, key index) -> visible; keys are the context tokens, then the slots."""


def plain_forward(
    draft: Draft, embeddings: Tensor, positions: Tensor, features: Tensor, context_positions: Tensor, sees: Sees
) -> Tensor:
    """Arguments as for `Draft.forward` and `Draft.context_keys_values`; returns [R, N, B, H] fp64."""
    config = draft.config
    weights = {name.split(".", 1)[1]: tensor.double() for name, tensor in draft.state_dict().items()}
    rows = []
    for row in range(embeddings.shape[0]):
        slots = [x.double() * config.input_embedding_scale for x in embeddings[row].flatten(0, 1)]
        slot_positions = positions[row].flatten().tolist()
        context = [
            _norm(weights["fc.weight"] @ c.double(), weights["hidden_norm.weight"], config.rms_norm_eps)
            for c in features[row]
        ]
        for layer in range(config.num_hidden_layers):
            slots = _layer(
                draft, weights, layer, slots, slot_positions, context, context_positions[row].tolist(), row, sees
            )
        normed = [_norm(x, weights["norm.weight"], config.rms_norm_eps) for x in slots]
        rows.append(torch.stack(normed).view(embeddings.shape[1:]))
    return torch.stack(rows)


def _layer(draft, weights, layer, slots, slot_positions, context, context_positions, row, sees):  # type: ignore[no-untyped-def]
    config = draft.config
    w = {name.removeprefix(f"layers.{layer}."): t for name, t in weights.items() if name.startswith(f"layers.{layer}.")}
    d, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    inner = [_norm(x, w["input_layernorm.weight"], config.rms_norm_eps) for x in slots]
    sources = list(zip(context + inner, context_positions + slot_positions, strict=True))
    output = []
    for q_index, x in enumerate(inner):
        heads = []
        for head in range(config.num_attention_heads):

            def part(name: str, index: int, source: Tensor) -> Tensor:
                return (w[f"self_attn.{name}.weight"] @ source)[index * d : (index + 1) * d]

            query = _norm(part("q_proj", head, x), w["self_attn.q_norm.weight"], config.rms_norm_eps)
            query = _turn(query, slot_positions[q_index], config)
            weighted, total = torch.zeros(d, dtype=torch.float64), 0.0
            for key_index, (source, position) in enumerate(sources):
                if not sees(row, layer, q_index, key_index):
                    continue
                key = _norm(part("k_proj", head // group, source), w["self_attn.k_norm.weight"], config.rms_norm_eps)
                key = _turn(key, position, config)
                weight = math.exp(float(query @ key) / math.sqrt(d))
                weighted, total = weighted + weight * part("v_proj", head // group, source), total + weight
            if config.attention_sinks:
                total += math.exp(float(w["self_attn.attention_sink_bias"][head]))
            heads.append(weighted / total)
        output.append(slots[q_index] + w["self_attn.o_proj.weight"] @ torch.cat(heads))
    result = []
    for x in output:
        y = _norm(x, w["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = w["mlp.gate_proj.weight"] @ y, w["mlp.up_proj.weight"] @ y
        result.append(x + w["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up))
    return result


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


def _turn(x: Tensor, position: int, config) -> Tensor:  # type: ignore[no-untyped-def]
    dim = int(config.head_dim * config.rope.partial_rotary_factor)
    turned = x.clone()
    for i in range(dim // 2):
        angle = position * config.rope.theta ** (-2 * i / dim)
        a, b = float(x[i]), float(x[i + dim // 2])
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    return turned
