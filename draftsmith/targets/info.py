"""A target as its configuration describes it: no weights are read, so that plans can be made anywhere."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from draftsmith.base.dtypes import parse_dtype
from draftsmith.errors import DraftsmithError
from draftsmith.targets.decoder import decoder_of
from draftsmith.targets.fields import field
from draftsmith.targets.location import empty_model, locate, read_config
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.rope import text_window

# Configuration fields by which some models scale what goes in or comes out, outside their embedding and head modules.
_SCALES = ("logit_scale", "logits_scaling", "embedding_multiplier", "scale_emb", "lm_head_multiplier")


@dataclass(frozen=True)
class TargetInfo:
    """Sizes, window, scales and kinds of layers of a target, and where it comes from.

    text_config: the Hugging Face configuration of the language model; source: as the user named the target; revision:
    the hub commit, None for what is not from the hub; embedding_scale: what the model multiplies its embeddings with
    (Gemma), None for most; tied: whether the output head is the embedding; decoder_layers: layers that the model has,
    None where they are as many as the configuration says; options: how the target is loaded, None for one that is in
    memory only.
    """

    text_config: Any
    source: str = "in memory"
    revision: str | None = None
    embedding_scale: float | None = None
    tied: bool = False
    decoder_layers: int | None = None
    options: TargetOptions | None = None

    @classmethod
    def load(cls, options: TargetOptions) -> "TargetInfo":
        """Reads the configuration only. Raises `DraftsmithError` as `Target.load` does for one that is missing or not
        supported."""
        location = locate(options.path)
        config = read_config(location, options.revision, options.trust_remote_code)
        return cls.of_model(empty_model(config, options.trust_remote_code), location.source, options)

    @classmethod
    def of_model(cls, model: Any, source: str, options: TargetOptions | None = None) -> "TargetInfo":
        """A Hugging Face causal language model, with or without its weights. Raises `DraftsmithError` for one that
        scales embeddings or logits in a way that is not known."""
        text_config = model.config.get_text_config()
        check_no_other_scales(text_config)
        layers = getattr(decoder_of(model), "layers", None)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        return cls(
            text_config,
            source,
            getattr(model.config, "_commit_hash", None),
            embedding_scale(embedding),
            head is not None and head.weight is embedding.weight,
            len(layers) if isinstance(layers, nn.ModuleList) else None,
            options,
        )

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """V, the rows of the output head."""
        return int(self.text_config.vocab_size)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.text_config.num_hidden_layers if self.decoder_layers is None else self.decoder_layers)

    @property
    def max_position_embeddings(self) -> int:
        """Positions that a text may have: the model's own, or fewer (`targets.rope`)."""
        return text_window(self.text_config)

    @property
    def softcap(self) -> float | None:
        """c in logits = c * tanh(logits / c), None for most."""
        return getattr(self.text_config, "final_logit_softcapping", None)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Each layer's kind (`targets.layers`), as the configuration names it; full attention where it names none."""
        return tuple(getattr(self.text_config, "layer_types", None) or ["full_attention"] * self.num_layers)

    @property
    def heads(self) -> int:
        """Query heads of an attention layer; of most, where layers differ."""
        return int(field(self.text_config, "num_attention_heads"))

    @property
    def kv_heads(self) -> int:
        """Key and value heads of an attention layer: as many as query heads where the configuration has no number; of
        most, where layers differ."""
        return int(field(self.text_config, "num_key_value_heads") or self.heads)

    @property
    def head_dim(self) -> int:
        """Width of a head: the hidden size divided among them where the configuration has none; of most, where layers
        differ."""
        return int(field(self.text_config, "head_dim") or self.hidden_size // self.heads)

    @property
    def intermediate_size(self) -> int:
        """Width of a dense MLP: of most, where layers differ; three times the hidden size, as in Qwen3, where the
        configuration has none (mixtures of experts)."""
        return int(field(self.text_config, "intermediate_size") or 3 * self.hidden_size)

    def loaded_dtype(self) -> torch.dtype:
        """The dtype that the target is loaded in: that of its options, else its configuration's. Raises
        `DraftsmithError` where neither has one."""
        wanted = None if self.options is None else parse_dtype(self.options.dtype)
        found = wanted or self.text_config.dtype
        if not isinstance(found, torch.dtype):
            raise DraftsmithError(
                f"neither target.dtype nor the configuration of {self.source} has a dtype; set target.dtype"
            )
        return found

    def loading(self) -> TargetOptions:
        """What somebody else needs to load the target. Raises `DraftsmithError` for one that is in memory only."""
        if self.options is None:
            raise DraftsmithError(f"the target {self.source} is in memory only, and has to be loaded from a path here")
        return self.options


def check_no_other_scales(text_config: Any) -> None:
    """Raise `DraftsmithError` if the model scales its embeddings or logits in a way `TargetEnds` does not compute."""
    for name in _SCALES:
        value = getattr(text_config, name, None)
        if value is not None and value != 1.0:
            raise DraftsmithError(
                f"the target's model type {text_config.model_type!r} has {name} = {value}; draftsmith knows Gemma's "
                "embedding scale and final_logit_softcapping, no other: this target is not supported"
            )


def embedding_scale(embedding: nn.Module) -> float | None:
    """What an embedding module multiplies its rows with: None for a plain one. Raises `DraftsmithError` for a module
    that does something else."""
    if type(embedding) is nn.Embedding:
        return None
    scale = getattr(embedding, "scalar_embed_scale", None)
    if scale is None:
        raise DraftsmithError(
            f"the target embeds tokens with {type(embedding).__name__}; supported are torch's Embedding and the scaled "
            "embeddings of the Gemma family"
        )
    return float(scale)
