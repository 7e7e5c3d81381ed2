"""What a decoder layer of a supported model is made of, with weights that are read together joined into one.

Joining moves the values: the model's own parameters become views of the joined storage, so the model's own code goes
on computing what it did, and memory does not double.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.gated_activation import ACTIVATIONS
from draftsmith.kernels.joined import join_rows


@dataclass(frozen=True)
class BlockStyle:
    """How a model family puts a layer together.

    post_norms: each sublayer's output is normed before it is added (Gemma); unit_offset: norms scale by 1 + weight, in
    fp32 (Gemma); rope_by_layer_type: the rotary module wants to know the layer's type.
    """

    post_norms: bool = False
    unit_offset: bool = False
    rope_by_layer_type: bool = False


STYLES = {
    "LlamaDecoderLayer": BlockStyle(),
    "MistralDecoderLayer": BlockStyle(),
    "Qwen2DecoderLayer": BlockStyle(),
    "Qwen3DecoderLayer": BlockStyle(),
    "Qwen3MoeDecoderLayer": BlockStyle(),
    "Gemma3DecoderLayer": BlockStyle(post_norms=True, unit_offset=True, rope_by_layer_type=True),
}
"""Decoder layers that can be fused, by the name of their class in transformers."""


@dataclass(frozen=True)
class Linear:
    """weight [N, K]; bias [N] or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Attention:
    """qkv: queries, keys and values, joined in this order; q_norm, k_norm [d] or None; out: the output projection."""

    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    heads: int


@dataclass(frozen=True)
class GatedMLP:
    """gate_up: the two joined, gate first; activation: as `kernels.gated_activation` names it."""

    gate_up: Linear
    down: Linear
    activation: str


@dataclass(frozen=True)
class Layer:
    """A decoder layer. mlp: a gated MLP, or the model's own module (a mixture of experts) that maps states to states.

    input_norm and mlp_norm [H] stand before the sublayers; attention_post_norm and mlp_post_norm [H] after them, where
    the family has these.
    """

    input_norm: Tensor
    attention: Attention
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp: GatedMLP | nn.Module
    mlp_post_norm: Tensor | None


def style_of(layers: Sequence[nn.Module]) -> BlockStyle:
    """The style of a model's layers. Raises `DraftsmithError` for kinds of layer that cannot be fused."""
    kinds = {type(layer).__name__ for layer in layers}
    unknown = sorted(kinds - set(STYLES))
    if unknown or len(kinds) != 1:
        raise DraftsmithError(
            f"layers of kind {', '.join(sorted(kinds))} cannot be fused; known are {', '.join(sorted(STYLES))} "
            "(set target.fuse to 'off': the model's own code then runs)"
        )
    return STYLES[kinds.pop()]


def join_layer(module: Any, style: BlockStyle, config: Any) -> Layer:
    """Reads a Hugging Face decoder layer and joins its weights in place.

    Raises `DraftsmithError` for weights that are not plain linear layers, or an activation without a kernel.
    """
    attention = module.self_attn
    norms = [module.input_layernorm, module.post_attention_layernorm]
    if style.post_norms:
        norms += [module.pre_feedforward_layernorm, module.post_feedforward_layernorm]
    input_norm, second, *further = (norm.weight.detach() for norm in norms)
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    joined = Attention(
        qkv=_join([attention.q_proj, attention.k_proj, attention.v_proj]),
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
        out=_single(attention.o_proj),
        heads=attention.q_proj.out_features // attention.head_dim,
    )
    return Layer(
        input_norm=input_norm,
        attention=joined,
        attention_post_norm=second if style.post_norms else None,
        mlp_norm=further[0] if style.post_norms else second,
        mlp=_join_mlp(module.mlp, config),
        mlp_post_norm=further[1] if style.post_norms else None,
    )


def norm_epsilon(layers: Sequence[Any]) -> float:
    """The one epsilon of all norms of these layers. Raises `DraftsmithError` where they differ."""
    found: set[Any] = set()
    for layer in layers:
        for module in layer.modules():
            if type(module).__name__.endswith("RMSNorm"):
                found.add(getattr(module, "variance_epsilon", getattr(module, "eps", None)))
    if len(found) != 1 or None in found:
        raise DraftsmithError(f"the norms of this target have epsilons {found}; one common epsilon can be fused")
    return float(found.pop())


def _join_mlp(mlp: Any, config: Any) -> GatedMLP | nn.Module:
    if not hasattr(mlp, "gate_proj"):
        return mlp  # a mixture of experts
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in ACTIVATIONS:
        raise DraftsmithError(
            f"the target's activation {activation!r} cannot be fused; known are {', '.join(ACTIVATIONS)} "
            "(set target.fuse to 'off')"
        )
    return GatedMLP(_join([mlp.gate_proj, mlp.up_proj]), _single(mlp.down_proj), activation)


def _single(module: Any) -> Linear:
    _check_plain(module)
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _join(modules: Sequence[Any]) -> Linear:
    """The modules' weights (and biases) one below the other; the modules keep views of them."""
    for module in modules:
        _check_plain(module)
    if len({module.bias is None for module in modules}) != 1:
        raise DraftsmithError("projections of which some have a bias and others none cannot be joined")
    weight = join_rows([module.weight for module in modules])
    bias = None if modules[0].bias is None else join_rows([module.bias for module in modules])
    return Linear(weight, bias)


def _check_plain(module: Any) -> None:
    if type(module) is not nn.Linear:
        raise DraftsmithError(
            f"a projection of the target is a {type(module).__name__}; only plain linear layers can be fused "
            "(set target.fuse to 'off')"
        )
