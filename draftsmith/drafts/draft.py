"""A draft network: backbone, perhaps a head, and the way in and out of directories."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.drafts.attention import AttentionKind, BlockAttention
from draftsmith.drafts.backbone import Backbone, ContextKeysValues
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.heads import HEADS

if TYPE_CHECKING:
    from draftsmith.targets.ends import TargetEnds


class Draft(nn.Module):
    """The network that proposes blocks. It owns no vocabulary: embeddings and the output head are the target's.

    Parameters are named as in files (layouts.md), after a first component that says whether they belong to the
    `backbone` or to the `head`.
    """

    def __init__(self, config: DraftConfig) -> None:
        """The modules with parameters not set; use `from_config` or `load`."""
        super().__init__()
        spec = HEADS[config.architecture]
        self.config = config
        self.backbone = Backbone(config, spec.wrappers)
        self.head = spec.build(config) if spec.build is not None else None

    @classmethod
    def from_config(cls, config: DraftConfig | dict[str, Any], *, generator: torch.Generator | None = None) -> "Draft":
        """A draft with fresh fp32 weights on the CPU, drawn from `generator` (default: torch's own).

        Projections are normal with standard deviation `initializer_range`, norms 1; heads set their own. Raises
        `DraftConfigError` for a configuration that cannot be right.
        """
        config = DraftConfig.parse(config)
        with torch.device("meta"):
            draft = cls(config)
        draft.to_empty(device="cpu")
        with torch.no_grad():
            # A parameter that no rule below reaches must not pass for an initialised one.
            for parameter in draft.parameters():
                parameter.fill_(float("nan"))
            for module in draft.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    module.weight.normal_(std=config.initializer_range, generator=generator)
                    if isinstance(module, nn.Linear) and module.bias is not None:
                        module.bias.zero_()
            for module in draft.modules():
                reset = getattr(module, "reset_parameters", None)
                if reset is not None and not isinstance(module, nn.Linear | nn.Embedding):
                    reset()
        return draft

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Each layer's attention pattern; a `BlockAttention` has to know all of them."""
        return self.config.attention_kinds

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters in memory."""
        return self.backbone.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.backbone.fc.weight.device

    def context_keys_values(self, features: Tensor, positions: Tensor) -> ContextKeysValues:
        """What the layers keep of verified tokens: c = hidden_norm(fc(features)), then each layer's keys and values
        of c.

        features [R, S, T*H], the tapped states of S tokens in the order of `target_layer_ids` (cast to the draft's
        dtype); positions [R, S] int64, absolute within their documents. Returns, per layer, keys (normed, rotated)
        and values, each [R, kv_heads, S, d]. Tokens do not influence each other, so any chunking gives the same.
        """
        return self.backbone.context_keys_values(features.to(self.dtype), positions)

    def forward(
        self, embeddings: Tensor, positions: Tensor, context: ContextKeysValues, attend: BlockAttention
    ) -> Tensor:
        """One pass over N blocks of B slots in each of R rows.

        embeddings [R, N, B, H], the target's embeddings of the blocks' token ids (cast to the draft's dtype and
        multiplied by `input_embedding_scale` here); positions [R, N, B] int64, of the slots; context as from
        `context_keys_values`, or a cache of it; attend, who sees whom. Returns the final normed states [R, N, B, H].
        """
        embeddings = embeddings.to(self.dtype)
        if self.config.input_embedding_scale != 1.0:
            embeddings = embeddings * self.config.input_embedding_scale
        return self.backbone(embeddings, positions, context, attend)

    def logits(self, hidden: Tensor, ends: "TargetEnds") -> Tensor:
        """Unary logits of slots: hidden [..., H] -> [..., V].

        The target's own output head (soft-cap included, if it has one), then the draft's `output_multiplier` and
        `final_logit_softcapping` c: c * tanh(logits / c).
        """
        logits = ends.project(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
