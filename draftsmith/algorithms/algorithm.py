"""What a method is: the contract that one file per method fulfils, and that capture, training and decoding ask.

A method states here, once, which features it needs (`capture`), how its blocks line up (`block_layout`), which head its
network has (`head`), what is summed and divided by what (`objective`), and what proposes tokens in decoding
(`drafter`). Nothing outside `algorithms/` asks a method for its name to decide what to do.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from draftsmith.algorithms.block_trainee import BlockMaker, BlockTrainee
from draftsmith.algorithms.block_trainee import BlockOutputs as BlockOutputs
from draftsmith.algorithms.block_trainee import Objective as Objective
from draftsmith.algorithms.drafter import AnyDrafter
from draftsmith.algorithms.options import DecodingOptions, parse_decoding_options
from draftsmith.algorithms.section import DraftSection
from draftsmith.algorithms.serving import Served, Serving
from draftsmith.algorithms.trainee import AnyExampleMaker, AnyTrainee, Computation
from draftsmith.algorithms.trainee import Terms as Terms
from draftsmith.blocks.anchors import VisibleSlots
from draftsmith.blocks.layout import BlockLayout
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads import HeadConfig
from draftsmith.features.schema import CaptureLayout
from draftsmith.targets.ends import TargetEnds


class Algorithm(ABC):
    """One member of the family. Instances carry no state; `registry.algorithm(name)` gives the one instance."""

    name: ClassVar[str]
    """The recipe's name of the method (`draft.algorithm`)."""
    head: ClassVar[type[HeadConfig]]
    """What its network has beside the shared one. Decoding picks the method whose name equals the architecture's."""
    summary: ClassVar[str]
    """One line for `draftsmith algorithms`."""
    paper: ClassVar[str]
    """Where it was published."""
    section: ClassVar[type[DraftSection]]
    """The typed `draft` section of its recipes."""
    published_head: ClassVar[dict[str, Any]] = {}
    """The fields of the section that size its head in published drafts, where they have no default."""
    decoding_options: ClassVar[type[DecodingOptions]] = DecodingOptions
    """What its drafter can be told."""
    trimming_options: ClassVar[tuple[str, ...]] = ()
    """Decoding options that only leave proposals out, and never change one."""

    @property
    def architecture(self) -> str:
        """The network it trains (`DraftConfig.architecture`)."""
        return self.head.architecture

    def head_config(self, section: DraftSection) -> dict[str, Any]:
        """The head's own fields of `DraftConfig.head`, as far as the recipe's section says them."""
        return section.said(*self.head.model_fields)

    @abstractmethod
    def block_layout(self, config: DraftConfig) -> BlockLayout:
        """Which slot predicts which token, for a draft of this configuration."""

    def capture(self, config: DraftConfig) -> CaptureLayout:
        """Which features training this draft needs of the target."""
        return CaptureLayout(config.target_layer_ids, config.hidden_size, final_state=False)

    def examples(self, config: DraftConfig, section: Any) -> AnyExampleMaker:
        """What finds examples to learn from, in reader processes."""
        block_size = config.block_for(self.name).size
        return BlockMaker(self.block_layout(config), config, self.visible_slots(section, block_size))

    def trainee(self, draft: Draft, ends: TargetEnds, section: Any, how: Computation) -> AnyTrainee:
        """What turns the examples into the terms of the loss; may set up `draft` to compute as `how` says."""
        return BlockTrainee(draft, ends, self.objective(draft.config, section), how)

    @abstractmethod
    def objective(self, config: DraftConfig, section: Any) -> Objective[Any]:
        """The training loss."""

    def replayable(self, section: Any) -> bool:
        """Whether a training step never waits for the device and all its tensors have sizes that the host knows: a CUDA
        graph of it can then be replayed."""
        return True

    @abstractmethod
    def num_proposals(self, config: DraftConfig) -> int:
        """Tokens that a draft of this configuration proposes a verify, unless it is told to propose fewer."""

    @abstractmethod
    def drafter(self, draft: Draft, ends: TargetEnds, options: DecodingOptions | None = None) -> AnyDrafter:
        """What proposes in decoding. options: of the class `decoding_options`; None: all defaults.

        Raises `DraftsmithError` for options that this draft cannot follow, such as more proposals than it has."""

    @abstractmethod
    def stepwise_drafter(self, draft: Draft, ends: TargetEnds, num_proposals: int | None = None) -> AnyDrafter:
        """A drafter of the same greedy tokens, up to rounding, for whoever wants to see what each was chosen from: it
        hands the logits of every proposal to the sampler, in order, and proposes what the sampler chooses. The draft's
        own modules run on any device, and nothing is left out for speed. num_proposals as in `DecodingOptions`."""

    def parse_decoding(self, own: Mapping[str, Any], num_proposals: int | None = None) -> DecodingOptions:
        """Typed decoding options from those of the method by name; `DraftsmithError` names each fault."""
        return parse_decoding_options(self.name, self.decoding_options, own, num_proposals)

    def serving(self, config: DraftConfig) -> Serving:
        """How SGLang and vLLM run this draft; as they run DFlash, unless a method says otherwise."""
        layout = self.block_layout(config)
        proposals = layout.max_proposals
        return Serving(Served("DFLASH", layout.verify_width(proposals)), Served("dflash", proposals))

    def visible_slots(self, section: Any, block_size: int) -> VisibleSlots | None:
        """How many leading slots of each training block carry their real tokens: None, just the anchor; otherwise a
        function (generator, number of blocks) -> int64 array of counts in [1, block_size)."""
        return None
