"""Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692) as layers of hybrid targets."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.kernels.recurrent.recurrence import Tokens
from draftsmith.targets.cache import KeysValuesShape
from draftsmith.targets.layers.kind import LayerKind, replaced_forward
from draftsmith.targets.layers.recurrent import RecurrentShape, RecurrentState, kept_state
from draftsmith.targets.passes import CachedPass


@dataclass(frozen=True)
class Projected:
    """What a layer's modules make of its input: mixed [slots, w, channels], queries, keys and values before the
    convolution; gate [slots, w, heads, value_dim] of the output norm; log_decay and rate as in `Tokens`."""

    mixed: Tensor
    gate: Tensor
    log_decay: Tensor
    rate: Tensor


class DeltaRule(LayerKind):
    """A layer that mixes tokens by the gated delta rule, behind a short convolution with SiLU.

    Projections, gates, output norm and output projection are the model's own modules, read by their names.
    """

    name: ClassVar[str] = "linear_attention"
    mixer: ClassVar[str] = "linear_attn"
    """The decoder layer's module that mixes tokens."""
    norm: ClassVar[str] = "norm"
    out: ClassVar[str] = "out_proj"

    @abstractmethod
    def project(self, mixer: Any, hidden: Tensor, shape: RecurrentShape) -> Projected:
        """Of hidden [slots, w, H]."""

    def running(self, layer: nn.Module, index: int, run: CachedPass) -> AbstractContextManager[None]:
        mixer: Any = getattr(layer, self.mixer)
        kept = kept_state(run, index, type(layer).__name__)

        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            run.ran(index)
            return self._mix(mixer, hidden_states, kept, run)

        return replaced_forward(mixer, forward)

    def _mix(self, mixer: Any, hidden: Tensor, kept: RecurrentState, run: CachedPass) -> Tensor:
        shape = kept.shape
        given = self.project(mixer, hidden, shape)
        convolution = mixer.conv1d
        mixed = kept.window.convolve(given.mixed, run, convolution.weight.squeeze(1), convolution.bias, silu=True)
        tokens = Tokens(*shape.split(mixed), given.log_decay.contiguous(), given.rate.contiguous())
        out = kept.advance(tokens, run, scale=shape.key_dim**-0.5, normalise=True)  # [slots, w, heads, value_dim]
        out = getattr(mixer, self.norm)(out.flatten(0, 2), given.gate.reshape(-1, shape.value_dim))
        return getattr(mixer, self.out)(out.view(*hidden.shape[:2], -1))


class GatedDelta(DeltaRule):
    """Gated DeltaNet: one decay a head. Qwen3.5 and its relatives, whose projections have a name each."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "lara_mini")

    def shape(self, text_config: Any, index: int, attention: KeysValuesShape | None) -> RecurrentShape:
        return RecurrentShape(
            heads=text_config.linear_num_value_heads,
            key_heads=text_config.linear_num_key_heads,
            key_dim=text_config.linear_key_head_dim,
            value_dim=text_config.linear_value_head_dim,
            taps=text_config.linear_conv_kernel_dim,
            by_channel=False,
            delta=True,
        )

    def project(self, mixer: Any, hidden: Tensor, shape: RecurrentShape) -> Projected:
        gate = mixer.in_proj_z(hidden)
        return self._gated(mixer, mixer.in_proj_qkv(hidden), gate, mixer.in_proj_a(hidden), mixer.in_proj_b(hidden))

    @staticmethod
    def _gated(mixer: Any, mixed: Tensor, gate: Tensor, decay: Tensor, rate: Tensor) -> Projected:
        """decay and rate [slots, w, heads], as projected."""
        log_decay = -mixer.A_log.float().exp() * functional.softplus(decay.float() + mixer.dt_bias)
        return Projected(mixed, gate, log_decay, rate.sigmoid().float())


class JoinedGatedDelta(GatedDelta):
    """Qwen3-Next: two projections, whose outputs lie key head by key head."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)

    def project(self, mixer: Any, hidden: Tensor, shape: RecurrentShape) -> Projected:
        groups = shape.heads // shape.key_heads
        values = groups * shape.value_dim
        query, key, value, gate = (
            mixer.in_proj_qkvz(hidden)
            .unflatten(-1, (shape.key_heads, -1))
            .split((shape.key_dim, shape.key_dim, values, values), dim=-1)
        )
        rate, decay = mixer.in_proj_ba(hidden).unflatten(-1, (shape.key_heads, -1)).split(groups, dim=-1)
        mixed = torch.cat([part.flatten(-2) for part in (query, key, value)], dim=-1)
        return self._gated(mixer, mixed, gate.flatten(-2), decay.flatten(-2), rate.flatten(-2))


class OlmoGatedDelta(GatedDelta):
    """OLMo-Hybrid: queries, keys and values have a projection each, and rates reach 2 where the configuration allows
    negative eigenvalues."""

    model_types: ClassVar[tuple[str, ...]] = ("olmo_hybrid",)
    norm: ClassVar[str] = "o_norm"
    out: ClassVar[str] = "o_proj"

    def project(self, mixer: Any, hidden: Tensor, shape: RecurrentShape) -> Projected:
        mixed = torch.cat([projection(hidden) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], dim=-1)
        given = self._gated(mixer, mixed, mixer.g_proj(hidden), mixer.a_proj(hidden), mixer.b_proj(hidden))
        rate = given.rate * 2 if mixer.allow_neg_eigval else given.rate
        return Projected(given.mixed, given.gate, given.log_decay, rate)


class KimiDelta(DeltaRule):
    """Kimi Delta Attention: a decay for every key channel, from the model's forget gate."""

    model_types: ClassVar[tuple[str, ...]] = ("kimi_linear",)
    mixer: ClassVar[str] = "self_attn"
    norm: ClassVar[str] = "o_norm"
    out: ClassVar[str] = "o_proj"

    def shape(self, text_config: Any, index: int, attention: KeysValuesShape | None) -> RecurrentShape:
        heads, dim = text_config.linear_num_heads, text_config.linear_head_dim
        return RecurrentShape(heads, heads, dim, dim, text_config.linear_conv_kernel_dim, by_channel=True, delta=True)

    def project(self, mixer: Any, hidden: Tensor, shape: RecurrentShape) -> Projected:
        mixed = torch.cat([projection(hidden) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)], dim=-1)
        gate, log_decay = mixer.g_b_proj(mixer.g_a_proj(hidden)), mixer.forget_gate(hidden).float()
        return Projected(mixed, gate, log_decay, mixer.b_proj(hidden).sigmoid().float())
