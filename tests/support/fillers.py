"""Fillers of blocks by a method's name, or by the method, and its decoding options by theirs."""

from typing import Any

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.algorithms.block_algorithm import BlockAlgorithm
from draftsmith.algorithms.registry import algorithm
from draftsmith.drafts.draft import Draft
from draftsmith.targets.ends import TargetEnds


def filler_of(
    method: str | Algorithm, draft: Draft, ends: TargetEnds, num_proposals: int | None = None, **own: Any
) -> Any:
    """What fills the draft's blocks under these options."""
    found = block_method(method)
    return found.filler(draft, ends, found.parse_decoding(own, num_proposals))


def stepwise_filler_of(
    method: str | Algorithm, draft: Draft, ends: TargetEnds, num_proposals: int | None = None
) -> Any:
    """What hands every slot's logits to the sampler."""
    return block_method(method).stepwise_filler(draft, ends, num_proposals)


def block_method(method: str | Algorithm) -> BlockAlgorithm[Any]:
    """The method, which is one of the DFlash family."""
    found = algorithm(method) if isinstance(method, str) else method
    assert isinstance(found, BlockAlgorithm)
    return found
