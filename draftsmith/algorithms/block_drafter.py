"""The drafter of methods that propose a block of slots in one pass: a runner computes the slots' states from the anchor
and mask tokens (DFlash, arXiv 2602.06036), a filler turns them into tokens."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Generic

from torch import Tensor

from draftsmith.algorithms.drafter import Proposals, Sampler, StatesWanted
from draftsmith.blocks.build import anchor_block_inputs
from draftsmith.blocks.layout import BlockLayout
from draftsmith.drafts.draft import Draft, HeadT
from draftsmith.drafts.runner import BlockRunner, ContextCache
from draftsmith.errors import DraftsmithError
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.target import TargetStates


@dataclass
class Filler(ABC, Generic[HeadT]):
    """Fills a block with tokens: a function of tensors without host synchronisation.

    ends: the target's; num_proposals: tokens proposed a block, at most `layout.max_proposals`. HeadT: the draft's head.
    """

    draft: Draft[HeadT]
    ends: TargetEnds
    layout: BlockLayout
    num_proposals: int

    @abstractmethod
    def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposals:
        """hidden [batch, B, H], the draft's final normed states of the block's slots; anchor_ids [batch] int64 -> P
        proposals, with q [batch, P, V] where they were drawn."""

    def predicting(self, hidden: Tensor) -> Tensor:
        """The states of the slots that propose: hidden [batch, B, H] -> [batch, P, H]."""
        return self.layout.predicting(hidden, dim=1)[:, : self.num_proposals]


class BlockDrafter:
    """A `Drafter` whose state is the context's keys and values in the draft's layers.

    A context entry lies at its position and counts for blocks anchored behind it: what a rejected proposal or padding
    left behind is overwritten before an anchor passes it, so that neither `valid` nor `count` changes anything.
    """

    def __init__(self, runner: BlockRunner, filler: Filler) -> None:
        self.runner = runner
        self.filler = filler
        self.layout = filler.layout
        self._ends = filler.ends
        self._block = filler.draft.config.block_for("decoding")
        self._wants = StatesWanted(filler.draft.config.target_layer_ids)

    @property
    def wants(self) -> StatesWanted:
        """The taps."""
        return self._wants

    @property
    def width(self) -> int:
        """The anchor and the proposals."""
        return self.layout.verify_width(self.filler.num_proposals)

    @property
    def reach(self) -> int:
        """The verify's tokens, or the block's slots where these are more."""
        return max(self.width, self.layout.block_size)

    def new_state(self, slots: int, length: int) -> ContextCache:
        """As in `Drafter`."""
        return self.runner.new_cache(slots, length)

    def read(self, state: ContextCache, ids: Tensor, states: TargetStates, start: Tensor, valid: Tensor) -> None:
        """As in `Drafter`."""
        self._append(state, states, start)

    def propose(
        self, state: ContextCache, anchors: Tensor, anchor_ids: Tensor, extent: int, sampler: Sampler
    ) -> Proposals:
        """As in `Drafter`."""
        embeddings = anchor_block_inputs(anchor_ids, self._block, self._ends)
        hidden = self.runner.block(embeddings, anchors, state, extent)  # [slots, B, H]
        return replace(self.filler.fill(hidden, anchor_ids, sampler), states=hidden)

    def update(self, state: ContextCache, ids: Tensor, states: TargetStates, start: Tensor, count: Tensor) -> None:
        """As in `Drafter`."""
        self._append(state, states, start)

    def _append(self, state: ContextCache, states: TargetStates, start: Tensor) -> None:
        assert states.taps is not None  # it wants them
        self.runner.append(states.taps, start, state)


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
