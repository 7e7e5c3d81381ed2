"""Checks that every method makes of what it is asked to do at decoding time."""

from typing import Any

from draftsmith.blocks.layout import BlockLayout
from draftsmith.errors import DraftsmithError


def check_num_proposals(num_proposals: int | None, layout: BlockLayout) -> int:
    """The number of proposals to make a block: as asked, or the most that the layout has room for."""
    if num_proposals is None:
        return layout.max_proposals
    if isinstance(num_proposals, bool) or not isinstance(num_proposals, int):
        raise DraftsmithError(f"num_proposals is {num_proposals!r}; it needs an integer of 1 to {layout.max_proposals}")
    if not 1 <= num_proposals <= layout.max_proposals:
        raise DraftsmithError(
            f"num_proposals is {num_proposals}; this draft's block of {layout.block_size} slots ({layout.kind.value}) "
            f"proposes 1 to {layout.max_proposals} tokens"
        )
    return num_proposals


def check_no_decoding_options(method: str, decoding: dict[str, Any]) -> None:
    """Refuse decoding options, for a method that has none."""
    if decoding:
        named = ", ".join(f"{name}={value!r}" for name, value in sorted(decoding.items()))
        raise DraftsmithError(f"{method} has no decoding options of its own; remove {named}")
