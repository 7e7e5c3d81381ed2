"""What each method costs: bytes of features a token, tokens a block, parameters."""

from dataclasses import dataclass, replace

import torch

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.drafts.backbone import is_added
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.rope_config import RopeConfig
from draftsmith.drafts.shapes import BlockShape

QWEN3_8B = DraftConfig(
    architecture="dflash",
    hidden_size=4096,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    max_position_embeddings=40960,
    rope=RopeConfig(rope_theta=1_000_000.0),
    layer_types=("full_attention",) * 5,
    block=BlockShape(size=16, mask_token_id=151669),
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
)
"""The published DFlash draft of Qwen3-8B, whose dimensions methods are compared in unless others are given."""


@dataclass(frozen=True)
class Costs:
    """bytes_per_token: of features in a store; proposals: the most tokens that it proposes a verify; parameters: of the
    draft, of which extra_parameters are the method's own, beside the network that all methods share."""

    bytes_per_token: int
    proposals: int
    parameters: int
    extra_parameters: int


def in_dimensions_of(base: DraftConfig, method: Algorithm) -> DraftConfig:
    """The draft of `method` with the network of `base`: its head as there where `base` has that head, otherwise of
    published sizes. Raises `DraftConfigError` where such a head does not fit the network."""
    if base.architecture == method.architecture:
        return base
    section = method.section(algorithm=method.name, **method.published_head)
    return base.replace(architecture=method.architecture, head=method.head_config(section))


def costs(method: Algorithm, config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> Costs:
    """Of a draft of this configuration, trained by this method on features of `dtype`; nothing is allocated."""
    with torch.device("meta"):
        draft = Draft(config)
    sizes = {name: parameter.numel() for name, parameter in draft.named_parameters()}
    extra = sum(size for name, size in sizes.items() if is_added(name))
    stored = replace(method.capture(config), dtype=dtype).bytes_per_token
    return Costs(stored, method.num_proposals(config), sum(sizes.values()), extra)
