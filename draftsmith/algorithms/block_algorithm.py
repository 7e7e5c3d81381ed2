"""What the methods of the DFlash family share: they propose a block of slots in one pass of the network."""

from abc import abstractmethod
from typing import Generic

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.algorithms.block_drafter import BlockDrafter, Filler
from draftsmith.algorithms.options import DecodingOptions, DecodingT
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.runner import DenseBlocks, block_runner
from draftsmith.errors import DraftsmithError
from draftsmith.targets.ends import TargetEnds


class BlockAlgorithm(Algorithm, Generic[DecodingT]):
    """A method of the family: `block_layout` lines its blocks up, a `Filler` turns their states into tokens.

    DecodingT: the type of its decoding options, of which `decoding_options` is the class.
    """

    @abstractmethod
    def filler(self, draft: Draft, ends: TargetEnds, options: DecodingT) -> Filler:
        """What fills the draft's blocks. Raises `DraftsmithError` as `drafter`."""

    @abstractmethod
    def stepwise_filler(self, draft: Draft, ends: TargetEnds, num_proposals: int | None = None) -> Filler:
        """What fills blocks for `stepwise_drafter`."""

    def num_proposals(self, config: DraftConfig) -> int:
        return self.block_layout(config).max_proposals

    def drafter(self, draft: Draft, ends: TargetEnds, options: DecodingOptions | None = None) -> BlockDrafter:
        if options is None:
            options = self.decoding_options()
        if not isinstance(options, self.decoding_options):
            raise DraftsmithError(
                f"the decoding options of {self.name} are {self.decoding_options.__name__}; "
                f"{type(options).__name__} is another method's"
            )
        filler = self.filler(draft, ends, options)  # type: ignore[arg-type]  # just checked
        return BlockDrafter(block_runner(draft), filler)

    def stepwise_drafter(self, draft: Draft, ends: TargetEnds, num_proposals: int | None = None) -> BlockDrafter:
        return BlockDrafter(DenseBlocks(draft), self.stepwise_filler(draft, ends, num_proposals))
