"""The parts of a draft's configuration that not every draft has: a block of masked slots, and a vocabulary of its
own."""

from collections.abc import Mapping
from typing import Annotated

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict

from draftsmith.drafts.checks import integer
from draftsmith.drafts.fields import Note, Warm
from draftsmith.layouts.spelling import Place

_LARGEST_BLOCK = 4096  # published blocks have 16 slots


class BlockShape(BaseModel):
    """A block of masked slots: `size` slots, anchor included, of which the others read the token `mask_token_id`.

    Files and recipes call the size `block_size`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Annotated[
        int,
        Ge(2),
        integer(2, "block_size", _LARGEST_BLOCK),
        Note(
            "Slots of a block, the anchor's included.",
            needed="the number of slots of a block, anchor included (published drafts: 16)",
            files=Place(speculators="block_size"),
            warm=Warm.FREE,
        ),
    ]
    mask_token_id: Annotated[
        int,
        Ge(0),
        integer(0),
        Note(
            "The token that masked slots read: one of the target's that never occurs in text.",
            needed="the id of a token that never occurs in text, such as a reserved one (never the pad or end token)",
            files=Place(nested=True, speculators="mask_token_id"),
            warm="masked slots read an embedding that the checkpoint was never trained on",
        ),
    ]


class VocabularyShape(BaseModel):
    """A vocabulary of the draft's own: `size` of the target's tokens, with a row of the draft's output head for each.

    Files and recipes call the size `draft_vocab_size`. Which tokens they are stands beside the weights
    (`drafts.vocabulary.DraftVocabulary`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: Annotated[
        int,
        Ge(1),
        integer(1, "draft_vocab_size"),
        Note(
            "Tokens that the draft knows, each with a row in an output head of its own; left out: the target's head.",
            dimension=True,
        ),
    ]


FLAT_NAMES: Mapping[tuple[str, ...], str] = {
    ("block", "size"): "block_size",
    ("block", "mask_token_id"): "mask_token_id",
    ("vocabulary", "size"): "draft_vocab_size",
}
"""Where a field of these parts is in `DraftConfig` -> its name in flat dictionaries (files, recipes, run records)."""
