"""Who makes features: the target, the tokenizer and its template."""

from typing import Any

from draftsmith.data.chat import template_fingerprint, tokenizer_fingerprint
from draftsmith.data.options import DataOptions
from draftsmith.features.identity import Provenance, target_identity
from draftsmith.features.manifest import TokenizerIdentity
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.location import locate
from draftsmith.targets.sampled import layers_fingerprint


def provenance(info: TargetInfo, ends: TargetEnds, tokenizer: Any, data: DataOptions) -> Provenance:
    """The provenance of features of this target; tokenizer None: unknown.

    Raises `DraftsmithError` for a target directory with files that are missing or damaged.
    """
    layers = None if info.options is None else layers_fingerprint(locate(info.options.path))
    identity = target_identity(info.source, info.revision, info.text_config, ends.head_weight, layers, info.num_layers)
    if tokenizer is None:
        return Provenance(identity, None)
    return Provenance(
        identity,
        TokenizerIdentity(
            vocabulary_hash=tokenizer_fingerprint(tokenizer), template_hash=template_fingerprint(tokenizer, data)
        ),
    )
