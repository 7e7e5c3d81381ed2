"""The draft's configuration, parsed and validated: the one owner of rope, mask token, tapped layers and head sizes."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class DraftConfig(BaseModel):
    """Canonical configuration of a draft network (fields as in layouts.md; see `layouts` for how files spell them)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    vocab_size: int
    max_position_embeddings: int
    rope: dict[str, Any]
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    causal: bool | None = None
    attention_sinks: bool = False
    initializer_range: float = 0.02
    dtype: str = "bfloat16"
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    head: dict[str, Any] = {}
