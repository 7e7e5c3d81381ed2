"""Rotary position embedding of the draft: cosines and sines computed from positions as they come.

There is no table, so there is no position at which one would read past its end; how far a draft may be used is the
configuration's `max_position_embeddings`, checked where a context length is known.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.drafts.network import RopeSizes


def inverse_frequencies(config: RopeSizes) -> tuple[Tensor, float]:
    """(inverse frequencies [rotary_dim / 2] fp32, factor on cosine and sine) of a draft's `rope`.

    The default type is 1 / theta^(2i / rotary_dim) with rotary_dim = head_dim * partial_rotary_factor; the scaled types
    (linear, YaRN, Llama 3) are computed by transformers, so that they agree with the targets'.
    """
    with torch.device("cpu"):  # also when the modules are being made on the meta device
        return _inverse_frequencies(config)


def _inverse_frequencies(config: RopeSizes) -> tuple[Tensor, float]:
    rope = config.rope
    if rope.type == "default":
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
        return 1.0 / (rope.theta**exponents), 1.0
    # The functions read their parameters from a model configuration; Qwen3's is the family's own.
    described = Qwen3Config(
        hidden_size=config.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope.as_parameters(),
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.type](described, torch.device("cpu"))
    return frequencies.float(), float(factor)


class Rope(nn.Module):
    """Positions -> (cosine, sine), in fp32 whatever the dtype of the module's weights."""

    inv_freq: Tensor

    def __init__(self, config: RopeSizes) -> None:
        super().__init__()
        frequencies, self.factor = inverse_frequencies(config)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `module.to(bfloat16)` casts every floating buffer; rounded frequencies would be wrong by whole turns at high
        # positions. Only the device may change.
        kept = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = kept.to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] int64 -> cosine and sine, each [..., rotary_dim] fp32 (the half-split "NeoX" arrangement)."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.factor, angles.sin() * self.factor


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates the first `rotary_dim` channels of `states` [..., d] by the angles of `cosine`, `sine` [..., rotary_dim].

    The remaining channels (partial rotary) pass unchanged. Cosine and sine are rounded to the dtype of `states`, as
    the family's published drafts do.
    """
    cosine, sine = cosine.to(states.dtype), sine.to(states.dtype)
    rotary_dim = cosine.shape[-1]
    turning, still = states[..., :rotary_dim], states[..., rotary_dim:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cosine + torch.cat((-second, first), dim=-1) * sine
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned
