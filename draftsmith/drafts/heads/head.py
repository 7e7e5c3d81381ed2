"""What an architecture is: fields of its own, how files spell them, and the modules that they make."""

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from draftsmith.drafts.backbone import Backbone
from draftsmith.drafts.checks import DraftConfigError, describe
from draftsmith.drafts.network import DraftSizes, Network, NetworkSizes
from draftsmith.drafts.wrapper import SublayerWrapper
from draftsmith.layouts.spelling import HeadSpelling, Member


class HasHead(Protocol):
    """A configuration with a head (`DraftConfig`)."""

    @property
    def head(self) -> "HeadConfig": ...


class HeadConfig(BaseModel):
    """One architecture: the head's own fields (unknown ones are errors), and what they make.

    A module `drafts/heads/NAME.py` holds one subclass, which is then known by its `architecture`; one from outside the
    package is made known by `algorithms.registry.register`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: ClassVar[str]
    """The name in `DraftConfig.architecture`."""
    spelling: ClassVar[HeadSpelling | None] = None
    """How files spell such drafts; None: no layout does."""
    needs_block: ClassVar[bool] = True
    """Whether its drafts fill blocks of masked slots, so that their configuration says `block_size` and
    `mask_token_id`; otherwise it may not."""
    own_vocabulary: ClassVar[bool] = False
    """Whether its drafts may have an output head over a part of the target's tokens (`draft_vocab_size`)."""

    def network(self, sizes: NetworkSizes) -> Network:
        """`Draft.backbone`: the network that runs blocks of slots, unless an architecture has one of its own. The names
        of its parameters are their names in files; weights are drawn as for `build`."""
        return Backbone(sizes, lambda: self.wrappers(sizes))

    def build(self, sizes: DraftSizes) -> nn.Module | None:
        """`Draft.head`, if there is one. The names of its parameters are their names in files. Modules with parameters
        of their own define `reset_parameters()`; `nn.Linear` and `nn.Embedding` weights are drawn by the draft."""
        return None

    def wrappers(self, sizes: DraftSizes) -> dict[str, SublayerWrapper]:
        """Modules around one layer's sublayers, by the names in `backbone.WRAPPED_SUBLAYERS`."""
        return {}

    def disagreements(self, sizes: DraftSizes) -> Iterable[str]:
        """Faults of these fields against the rest of the draft: one line each."""
        return ()

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> "HeadConfig":
        """The head of these fields; `DraftConfigError` names each fault."""
        if fields and not cls.model_fields:
            raise DraftConfigError(f"head has {', '.join(sorted(fields))}; this architecture has no head: remove them")
        try:
            return cls(**fields)
        except ValidationError as error:
            raise DraftConfigError(describe(error, "the draft's head", cls.model_fields)) from None

    @classmethod
    def of(cls, config: "HasHead") -> Self:
        """The head of a draft's configuration, which is known to be of this architecture; `DraftConfigError` where it
        is not."""
        if not isinstance(config.head, cls):
            raise DraftConfigError(
                f"the draft is of architecture {config.head.architecture!r}; allowed here: {cls.architecture!r}"
            )
        return config.head

    @classmethod
    def member(cls) -> Member | None:
        """What layouts are told of the architecture."""
        return None if cls.spelling is None else Member(cls.architecture, tuple(cls.model_fields), cls.spelling)
