"""A small draft of every method, as a recipe asks for it."""

from typing import Any

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import algorithm, all_algorithms
from draftsmith.algorithms.section import DraftSection
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target
from tests.support.tiny_draft import scramble

METHODS = [method.name for method in all_algorithms()]

# What a method's `draft` section needs at this size, beside the fields that all share.
_HEADS: dict[str, dict[str, Any]] = {
    "dflash2": {"conv_group_size": 4, "selector_rank": 4, "selector_top_k": 3},
    "domino": {"gru_hidden_dim": 7, "emb_dim": 6, "shift_label": True},
    "dspark": {"markov_rank": 4},
}


def section_of(method: str, **fields: Any) -> DraftSection:
    """The recipe's `draft` section; `fields` must name `mask_token_id`."""
    shared = {"block_size": 6, "num_hidden_layers": 1, "dtype": "float32"}
    return algorithm(method).section(**{**shared, **_HEADS.get(method, {}), **fields})


def draft_of(method: str, target: Target, *, seed: int = 0, **fields: Any) -> Draft:
    """A random draft for `target`; its mask token is the target's last id."""
    section = section_of(method, mask_token_id=target.vocab_size - 1, **fields)
    draft = Draft.from_config(draft_config(section, target.info))
    scramble(draft, seed)
    return draft.eval()
