"""What a method is: the contract that one file per method fulfils, and that capture, training and decoding ask.

A method states here, once, which head its network has (`head`), which features it needs (`capture`), what it learns
from (`examples`), what is summed and divided by what (`trainee`), and what proposes tokens in decoding (`drafter`).
Nothing outside `algorithms/` asks a method for its name to decide what to do.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic

from typing_extensions import TypeVar

from draftsmith.algorithms.drafter import AnyDrafter
from draftsmith.algorithms.options import DecodingOptions, parse_decoding_options
from draftsmith.algorithms.section import DraftSection
from draftsmith.algorithms.serving import Serving
from draftsmith.algorithms.trainee import AnyExampleMaker, AnyTrainee, Computation, Corpus
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft, HeadT, NetworkT
from draftsmith.drafts.heads import HeadConfig
from draftsmith.features.schema import CaptureLayout
from draftsmith.targets.ends import TargetEnds

SectionT = TypeVar("SectionT", bound=DraftSection, default=Any)
"""The type of a method's `draft` section."""


class Algorithm(ABC, Generic[SectionT, HeadT, NetworkT]):
    """One method. Instances carry no state; `registry.algorithm(name)` gives the one instance.

    SectionT: the type of its recipes' sections, of which `section` is the class; HeadT: the module of its drafts' head,
    None for drafts without one; NetworkT: their network.
    """

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

    def head_config(self, section: SectionT) -> dict[str, Any]:
        """The head's own fields of `DraftConfig.head`, as far as the recipe's section says them."""
        return section.said(*self.head.model_fields)

    def capture(self, config: DraftConfig) -> CaptureLayout:
        """Which features training this draft needs of the target."""
        return CaptureLayout(config.target_layer_ids, config.hidden_size, final_state=False)

    @abstractmethod
    def examples(self, config: DraftConfig, section: SectionT) -> AnyExampleMaker:
        """What finds examples to learn from, in reader processes. Raises `DraftsmithError` for a draft that cannot be
        trained."""

    def initialise(self, draft: Draft[HeadT, NetworkT], ends: TargetEnds, corpus: Corpus) -> None:
        """What a fresh draft takes from its target and from what it is going to learn: the tokens of its vocabulary,
        say. Called before the first step of a run that starts from no checkpoint; nothing, unless a method needs it."""

    @abstractmethod
    def trainee(
        self, draft: Draft[HeadT, NetworkT], ends: TargetEnds, section: SectionT, how: Computation
    ) -> AnyTrainee:
        """What turns the examples into the terms of the loss; may set up `draft` to compute as `how` says. Raises
        `DraftsmithError` for what this draft cannot do."""

    def replayable(self, section: SectionT) -> bool:
        """Whether a training step never waits for the device and all its tensors have sizes that the host knows: a CUDA
        graph of it can then be replayed."""
        return True

    @abstractmethod
    def num_proposals(self, config: DraftConfig) -> int:
        """Tokens that a draft of this configuration proposes a verify, unless it is told to propose fewer."""

    @abstractmethod
    def drafter(
        self, draft: Draft[HeadT, NetworkT], ends: TargetEnds, options: DecodingOptions | None = None
    ) -> AnyDrafter:
        """What proposes in decoding. options: of the class `decoding_options`; None: all defaults.

        Raises `DraftsmithError` for options that this draft cannot follow, such as more proposals than it has."""

    @abstractmethod
    def stepwise_drafter(
        self, draft: Draft[HeadT, NetworkT], ends: TargetEnds, num_proposals: int | None = None
    ) -> AnyDrafter:
        """A drafter of the same greedy tokens, up to rounding, for whoever wants to see what each was chosen from: it
        hands the logits of every proposal to the sampler, in order, and proposes what the sampler chooses. The draft's
        own modules run on any device, and nothing is left out for speed. num_proposals as in `DecodingOptions`."""

    def parse_decoding(self, own: Mapping[str, Any], num_proposals: int | None = None) -> DecodingOptions:
        """Typed decoding options from those of the method by name; `DraftsmithError` names each fault."""
        return parse_decoding_options(self.name, self.decoding_options, own, num_proposals)

    @abstractmethod
    def serving(self, config: DraftConfig) -> Serving:
        """How SGLang and vLLM run this draft."""
