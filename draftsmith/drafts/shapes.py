"""The parts of a draft's configuration that not every draft has: a block of masked slots, and a vocabulary of its
own."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from draftsmith.drafts.checks import integer


class BlockShape(BaseModel):
    """A block of masked slots: `size` slots, anchor included, of which the others read the token `mask_token_id`.

    Files and recipes call the size `block_size`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Annotated[int, integer(2, "block_size")]
    mask_token_id: Annotated[int, integer(0)]


class VocabularyShape(BaseModel):
    """A vocabulary of the draft's own: `size` of the target's tokens, with a row of the draft's output head for each.

    Files and recipes call the size `draft_vocab_size`. Which tokens they are stands beside the weights
    (`drafts.vocabulary.DraftVocabulary`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Annotated[int, integer(1, "draft_vocab_size")]


FLAT_NAMES: Mapping[tuple[str, ...], str] = {
    ("block", "size"): "block_size",
    ("block", "mask_token_id"): "mask_token_id",
    ("vocabulary", "size"): "draft_vocab_size",
}
"""Where a field of these parts is in `DraftConfig` -> its name in flat dictionaries (files, recipes, run records)."""
