"""What documents must be like to be trained on, asked before any work."""

import logging

from draftsmith.drafts.config import DraftConfig
from draftsmith.errors import DraftsmithError
from draftsmith.parallel.ranks import is_first
from draftsmith.training.source import FeatureSource

_log = logging.getLogger(__name__)


def check_fit(source: FeatureSource, tokens_per_row: int) -> None:
    """Raise `DraftsmithError` where a document does not fit into a row, naming the longest."""
    longest = max(range(len(source.lengths)), key=lambda document: source.lengths[document])
    if source.lengths[longest] > tokens_per_row:
        many = sum(length > tokens_per_row for length in source.lengths)
        raise DraftsmithError(
            f"train.tokens_per_row is {tokens_per_row}, and {many:,} of the {len(source.lengths):,} documents of "
            f"{source.place} are longer: {source.sample_ids[longest]!r} has {source.lengths[longest]:,} tokens. Raise "
            "train.tokens_per_row to that, or capture with a smaller data.max_length"
        )


def tell_masked(source: FeatureSource, config: DraftConfig) -> None:
    """Warn where documents hold the draft's mask token, which stands for a token that is not known yet."""
    if config.block is None or not is_first():
        return
    token = config.block.mask_token_id
    held = sum(bool((input_ids == token).any()) for input_ids, _ in source.texts(range(len(source.sample_ids))))
    if held:
        _log.warning(
            "the mask token %d occurs in %s of the %s documents of %s: there the draft cannot tell a word from an "
            "empty slot; use a token that no text holds (draft.mask_token_id), or leave such documents out",
            token,
            f"{held:,}",
            f"{len(source.lengths):,}",
            source.place,
        )
