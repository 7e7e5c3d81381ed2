"""What a draft's network is made for, and what every network has."""

from typing import ClassVar, Protocol

from torch import nn

from draftsmith.drafts.attention import AttentionKind
from draftsmith.drafts.rope_config import RopeConfig
from draftsmith.drafts.shapes import BlockShape


class DraftSizes(Protocol):
    """What a head may know of the draft that it belongs to (`DraftConfig`)."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def block_for(self, user: str) -> BlockShape: ...


class RopeSizes(Protocol):
    """What rotary embedding depends on (`DraftConfig`)."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rotary_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rope(self) -> RopeConfig: ...


class NetworkSizes(DraftSizes, RopeSizes, Protocol):
    """What a network may know of the draft that it belongs to (`DraftConfig`)."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def attention_sinks(self) -> bool: ...
    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]: ...
    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...


class Network(nn.Module):
    """What reads the target's states. Whatever else it computes, `fc` fuses the taps, [.., T*H]; the dtype and the
    device of its weight are the draft's."""

    read_first: ClassVar[tuple[str, ...]] = ()
    """Parts of its `layers` that a forward uses before the first of them runs, as well as in it."""

    fc: nn.Linear
