"""Who made the features: a target is told by its shape and weights, not by where it is stored."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.features.manifest import TargetIdentity, TokenizerIdentity
from draftsmith.targets.fields import field, of_each_layer

# What fixes a decoder's shape under the same names in every release of transformers.
_CONFIG_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
)
_SAMPLED_WEIGHTS = 1 << 16


@dataclass(frozen=True)
class Provenance:
    """What made a store's features: the target, and the tokenizer and template of its ids (None: unknown)."""

    target: TargetIdentity
    tokenizer: TokenizerIdentity | None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _field(text_config: Any, name: str) -> Any:
    by_layer = of_each_layer(text_config, name)
    return field(text_config, name) if by_layer is None else by_layer


def target_identity(
    source: str,
    revision: str | None,
    text_config: Any,
    head_weight: Tensor,
    layers_hash: str | None = None,
    num_layers: int | None = None,
) -> TargetIdentity:
    """The identity of a target, from its text configuration, its output head's weight [V, H], and a fingerprint of its
    layers where their files are at hand (`targets.sampled`). num_layers: None for as many as its configuration says.

    The first two are there wherever a target, or only its two ends, is loaded. The head is sampled evenly and rounded
    to bfloat16, so that the precision a model was loaded in does not change who it is.
    """
    flat = head_weight.detach().reshape(-1)
    step = max(1, flat.shape[0] // _SAMPLED_WEIGHTS)
    sampled = flat[::step].to(torch.bfloat16).cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return TargetIdentity(
        source=source,
        revision=revision,
        config_hash=_digest({name: _field(text_config, name) for name in _CONFIG_FIELDS}),
        weights_hash=hashlib.sha256(sampled).hexdigest(),
        layers_hash=layers_hash,
        vocab_size=int(text_config.vocab_size),
        num_layers=int(text_config.num_hidden_layers if num_layers is None else num_layers),
    )
