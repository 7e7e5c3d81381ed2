"""What a decoder layer of a supported model is made of, with weights that are read together joined into one.

Joining moves the values: the model's own parameters become views of the joined storage, so the model's own code goes
on computing what it did, and memory does not double.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from draftsmith.kernels.attention.rope_cache import HeadNorms
from draftsmith.kernels.fused_layer import FusedAttention, FusedLayer, FusedNorm, GatedMLP, Linear
from draftsmith.kernels.layers.gated_activation import ACTIVATIONS
from draftsmith.kernels.layers.joined import join_rows
from draftsmith.targets.rope import length_dependent_type


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
class LayerFacts:
    """What a layer tells the attention function: scale of the scores, window or None, cap of the scores or None, and
    sinks [heads] or None."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None


def fusing_fault(decoder: Any, config: Any) -> str | None:
    """Why a Hugging Face decoder cannot be fused, for a message that names the target; None where nothing speaks
    against it. config: its text configuration."""
    return next(_faults(decoder, config), None)


def _faults(decoder: Any, config: Any) -> Iterator[str]:
    kinds = sorted({type(layer).__name__ for layer in decoder.layers})
    if len(kinds) != 1 or kinds[0] not in STYLES:
        yield f"its layers are of kind {', '.join(kinds)}; allowed: all of one kind of {', '.join(sorted(STYLES))}"
        return
    rope_type = length_dependent_type(config)
    if rope_type is not None:
        yield f"its rope of type {rope_type!r} depends on the length of the text; allowed: angles by position"
    epsilons = _epsilons(decoder)
    if len(epsilons) != 1 or None in epsilons:
        yield f"its norms have the epsilons {', '.join(sorted(map(str, epsilons))) or 'none'}; allowed: one for all"
    gated = [layer.mlp for layer in decoder.layers if _is_gated(layer.mlp)]
    if gated and _activation(config) not in ACTIVATIONS:
        yield f"its activation is {_activation(config)!r}; allowed: {', '.join(map(repr, ACTIVATIONS))}"
    for index, layer in enumerate(decoder.layers):
        for name, module in layer.named_children():
            if name.endswith("layernorm") and not _is_norm(module):
                kind = type(module).__name__
                yield f"layer {index}: {name} is of kind {kind}; allowed: an RMS norm, as its family has"
        for name, fault in _projection_faults(layer):
            yield f"layer {index}: {name} {fault}"


def _projection_faults(layer: Any) -> Iterator[tuple[str, str]]:
    """(names of projections, what is wrong with them) of a layer, group by group of those that are joined."""
    attention, mlp = layer.self_attn, layer.mlp
    groups = [(attention, ("q_proj", "k_proj", "v_proj")), (attention, ("o_proj",))]
    if _is_gated(mlp):
        groups += [(mlp, ("gate_proj", "up_proj")), (mlp, ("down_proj",))]
    for parent, names in groups:
        modules = [getattr(parent, name) for name in names]
        for name, module in zip(names, modules, strict=True):
            if type(module) is not nn.Linear:
                yield name, f"is a {type(module).__name__}; allowed: a plain linear layer"
                return
            if type(module.weight) is not nn.Parameter:  # quantised weights pass for linear layers
                yield name, f"holds a {type(module.weight).__name__}; allowed: a plain parameter"
                return
            if _does_more(module):  # rounds its inputs to 8 bits, say
                yield name, "runs code of its own around its product; allowed: a plain linear layer"
                return
        if len({module.bias is None for module in modules}) != 1:
            yield ", ".join(names), "have a bias in part; allowed: all of them or none"
        if len({module.weight.dtype for module in modules}) != 1:
            yield ", ".join(names), "are of several dtypes; allowed: one"


def _does_more(linear: nn.Module) -> bool:
    """Whether somebody put code around a module's forward, as packages for quantised activations do."""
    return "forward" in vars(linear) or bool(linear._forward_hooks or linear._forward_pre_hooks)


def join_layer(module: Any, style: BlockStyle, config: Any, facts: LayerFacts, epsilon: float) -> FusedLayer:
    """Reads a Hugging Face decoder layer, against which `fusing_fault` has nothing, and joins its weights in place."""
    attention = module.self_attn
    norms = [module.input_layernorm, module.post_attention_layernorm]
    if style.post_norms:
        norms += [module.pre_feedforward_layernorm, module.post_feedforward_layernorm]
    input_norm, second, *further = (norm.weight.detach() for norm in norms)
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    head_norms = None
    if q_norm is not None and k_norm is not None:
        head_norms = HeadNorms(q_norm.weight.detach(), k_norm.weight.detach(), epsilon, style.unit_offset)
    return FusedLayer(
        input_norm=FusedNorm(input_norm, epsilon, style.unit_offset),
        attention=FusedAttention(
            qkv=_join([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=_single(attention.o_proj),
            heads=attention.q_proj.out_features // attention.head_dim,
            norms=head_norms,
            scale=facts.scale,
            softcap=facts.softcap,
            sinks=facts.sinks,
        ),
        mlp_norm=FusedNorm(further[0] if style.post_norms else second, epsilon, style.unit_offset),
        mlp=_join_mlp(module.mlp, config),
        attention_post_norm=second if style.post_norms else None,
        mlp_post_norm=further[1] if style.post_norms else None,
    )


def norm_epsilon(decoder: Any) -> float:
    """The one epsilon of all norms of a decoder against which `fusing_fault` has nothing."""
    (epsilon,) = _epsilons(decoder)
    return float(epsilon)


def _epsilons(decoder: Any) -> set[Any]:
    norms = filter(_is_norm, decoder.modules())
    return {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _is_gated(mlp: Any) -> bool:
    """Whether this is a gated MLP, and not a mixture of experts."""
    return hasattr(mlp, "gate_proj")


def _activation(config: Any) -> Any:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _join_mlp(mlp: Any, config: Any) -> GatedMLP | nn.Module:
    if not _is_gated(mlp):
        return mlp
    return GatedMLP(_join([mlp.gate_proj, mlp.up_proj]), _single(mlp.down_proj), _activation(config))


def _single(module: Any) -> Linear:
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _join(modules: Sequence[Any]) -> Linear:
    """The modules' weights (and biases) one below the other; the modules keep views of them."""
    weight = join_rows([module.weight for module in modules])
    bias = None if modules[0].bias is None else join_rows([module.bias for module in modules])
    return Linear(weight, bias)
