"""What training needs of a target without loading its layers: configuration, the two ends, tokenizer, identity."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from draftsmith.data.chat import template_fingerprint, tokenizer_fingerprint
from draftsmith.data.options import DataOptions
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance, target_identity
from draftsmith.features.manifest import TokenizerIdentity
from draftsmith.targets.description import ConfiguredSizes
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.final_norm import load_final_norm
from draftsmith.targets.location import locate, read_config
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.target import Target


@dataclass(frozen=True)
class TargetOutline(ConfiguredSizes):
    """A target's facts (`algorithms.build.TargetFacts`), its embedding and output head, and where it comes from."""

    text_config: Any
    ends: TargetEnds
    tokenizer: Any
    source: str
    revision: str | None
    options: TargetOptions | None = None
    """How the target is loaded; None where it is in memory only."""

    @classmethod
    def of(cls, target: Target, options: TargetOptions | None = None) -> "TargetOutline":
        """The outline of a loaded target; shares its tensors. options: what it was loaded with."""
        return cls(target.text_config, target.ends, target.tokenizer, target.source, target.revision, options)

    @classmethod
    def load(cls, options: TargetOptions) -> "TargetOutline":
        """Reads configuration, embedding, output head and tokenizer; raises `DraftsmithError` as `Target.load` does."""
        location = locate(options.path)
        config = read_config(location, options.revision, options.trust_remote_code)
        tokenizer = None
        if location.has_tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(
                location.name, revision=options.revision, trust_remote_code=options.trust_remote_code
            )
        ends = TargetEnds.load(**options.model_dump(exclude={"fuse"}))  # the ends have no layers to fuse
        revision = getattr(config, "_commit_hash", None)
        return cls(config.get_text_config(), ends, tokenizer, location.source, revision, options)

    def final_norm(self) -> nn.Module:
        """The target's final norm on the CPU, in the dtype that its options name; reads no other weights.

        Raises `DraftsmithError` as `load_final_norm` and `loading` do.
        """
        return load_final_norm(**self.loading().model_dump(exclude={"fuse", "device"}))

    def loading(self) -> TargetOptions:
        """What somebody else needs to load the target. Raises `DraftsmithError` for one that is in memory only."""
        if self.options is None:
            raise DraftsmithError(f"the target {self.source} is in memory only, and has to be loaded from a path here")
        return self.options

    @property
    def embedding_scale(self) -> float | None:
        return self.ends.embedding_scale


def provenance(outline: TargetOutline, tokenizer: Any, data: DataOptions) -> Provenance:
    """Who makes features: the target, the tokenizer and its template."""
    identity = target_identity(outline.source, outline.revision, outline.text_config, outline.ends.head_weight)
    if tokenizer is None:
        return Provenance(identity, None)
    return Provenance(
        identity,
        TokenizerIdentity(
            vocabulary_hash=tokenizer_fingerprint(tokenizer), template_hash=template_fingerprint(tokenizer, data)
        ),
    )
