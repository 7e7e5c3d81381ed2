"""A target described by its configuration alone: no weights are read, so that plans can be made anywhere."""

from dataclasses import dataclass
from typing import Any

from draftsmith.targets.ends import check_no_other_scales, embedding_scale
from draftsmith.targets.location import empty_model, locate, read_config
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.rope import text_window


class ConfiguredSizes:
    """A target's sizes as its Hugging Face text configuration says, for who has that."""

    text_config: Any

    @property
    def hidden_size(self) -> int:
        return int(self.text_config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.text_config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    @property
    def max_position_embeddings(self) -> int:
        return text_window(self.text_config)


@dataclass(frozen=True)
class TargetDescription(ConfiguredSizes):
    """What a draft's configuration needs to know of its target (`algorithms.build.TargetFacts`).

    text_config: the Hugging Face text configuration; embedding_scale: what the model multiplies its embeddings with
    (Gemma), None for most.
    """

    text_config: Any
    embedding_scale: float | None

    @classmethod
    def load(cls, options: TargetOptions) -> "TargetDescription":
        """Reads the configuration only; raises `DraftsmithError` as `TargetEnds.load` does for one that is missing or
        not supported."""
        location = locate(options.path)
        config = read_config(location, options.revision, options.trust_remote_code)
        text_config = config.get_text_config()
        check_no_other_scales(text_config)
        shell = empty_model(config, options.trust_remote_code)
        return cls(text_config, embedding_scale(shell.get_input_embeddings()))
