"""What the methods of the DFlash family share: they propose a block of slots in one pass of the network."""

from abc import abstractmethod
from typing import Generic

from draftsmith.algorithms.algorithm import Algorithm, SectionT
from draftsmith.algorithms.block_drafter import BlockDrafter, Filler
from draftsmith.algorithms.block_trainee import BlockMaker, BlockTrainee, Objective
from draftsmith.algorithms.options import DecodingOptions, DecodingT
from draftsmith.algorithms.serving import Served, Serving
from draftsmith.algorithms.trainee import Computation
from draftsmith.blocks.anchors import VisibleSlots
from draftsmith.blocks.layout import BlockLayout
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft, HeadT
from draftsmith.drafts.runner import DenseBlocks, block_runner
from draftsmith.errors import DraftsmithError
from draftsmith.targets.ends import TargetEnds


class BlockAlgorithm(Algorithm[SectionT, HeadT], Generic[SectionT, HeadT, DecodingT]):
    """A method of the family: `block_layout` lines its blocks up, an `Objective` learns from their states, a `Filler`
    turns them into tokens.

    DecodingT: the type of its decoding options, of which `decoding_options` is the class.
    """

    @abstractmethod
    def block_layout(self, config: DraftConfig) -> BlockLayout:
        """Which slot predicts which token, for a draft of this configuration."""

    # --- training ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def objective(self, config: DraftConfig, section: SectionT) -> Objective[HeadT]:
        """The training loss."""

    def visible_slots(self, section: SectionT, block_size: int) -> VisibleSlots | None:
        """How many leading slots of each training block carry their real tokens: None, just the anchor; otherwise a
        function (generator, number of blocks) -> int64 array of counts in [1, block_size), which can be pickled."""
        return None

    def examples(self, config: DraftConfig, section: SectionT) -> BlockMaker:
        block_size = config.block_for(self.name).size
        return BlockMaker(self.block_layout(config), config, self.visible_slots(section, block_size))

    def trainee(
        self, draft: Draft[HeadT], ends: TargetEnds, section: SectionT, how: Computation
    ) -> BlockTrainee[HeadT]:
        return BlockTrainee(draft, ends, self.objective(draft.config, section), how)

    # --- decoding ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def filler(self, draft: Draft[HeadT], ends: TargetEnds, options: DecodingT) -> Filler[HeadT]:
        """What fills the draft's blocks. Raises `DraftsmithError` as `drafter`."""

    @abstractmethod
    def stepwise_filler(self, draft: Draft[HeadT], ends: TargetEnds, num_proposals: int | None = None) -> Filler[HeadT]:
        """What fills blocks for `stepwise_drafter`."""

    def num_proposals(self, config: DraftConfig) -> int:
        return self.block_layout(config).max_proposals

    def drafter(self, draft: Draft[HeadT], ends: TargetEnds, options: DecodingOptions | None = None) -> BlockDrafter:
        if options is None:
            options = self.decoding_options()
        if not isinstance(options, self.decoding_options):
            raise DraftsmithError(
                f"the decoding options of {self.name} are {self.decoding_options.__name__}; "
                f"{type(options).__name__} is another method's"
            )
        filler = self.filler(draft, ends, options)  # type: ignore[arg-type]  # just checked
        return BlockDrafter(block_runner(draft), filler)

    def stepwise_drafter(self, draft: Draft[HeadT], ends: TargetEnds, num_proposals: int | None = None) -> BlockDrafter:
        return BlockDrafter(DenseBlocks(draft), self.stepwise_filler(draft, ends, num_proposals))

    def serving(self, config: DraftConfig) -> Serving:
        """As SGLang and vLLM run DFlash, unless a method says otherwise."""
        layout = self.block_layout(config)
        proposals = layout.max_proposals
        return Serving(Served("DFLASH", layout.verify_width(proposals)), Served("dflash", proposals))
