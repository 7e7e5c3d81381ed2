"""What a head is to the rest of a draft: a typed configuration, a module, and perhaps wrappers around sublayers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from draftsmith.drafts.checks import DraftConfigError, describe

if TYPE_CHECKING:
    from draftsmith.drafts.config import DraftConfig


class HeadConfig(BaseModel):
    """Base of the heads' own fields; unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def disagreements(self, config: "DraftConfig") -> Iterable[str]:
        """Faults of these fields against the rest of the draft (block size, hidden size): one line each."""
        return ()


@dataclass(frozen=True)
class HeadSpec:
    """What one architecture adds to the backbone; everything left None for the plain backbone.

    config: the type of its own fields (`DraftConfig.head`). build: makes `draft.head`; its parameters' names in files
    are their names in the module. wrappers: makes the modules around each layer's sublayers (names as in
    `backbone.WRAPPED_SUBLAYERS`). Modules with parameters of their own define `reset_parameters()`; `nn.Linear` and
    `nn.Embedding` weights are drawn by the draft. needs_block: whether its drafts fill blocks of masked slots, so that
    their configuration says `block_size` and `mask_token_id`; own_vocabulary: whether they may have an output head over
    a part of the target's tokens (`draft_vocab_size`).
    """

    config: type[HeadConfig] | None = None
    build: Callable[["DraftConfig"], nn.Module] | None = None
    wrappers: Callable[["DraftConfig"], dict[str, nn.Module]] | None = None
    needs_block: bool = True
    own_vocabulary: bool = False

    def parse(self, fields: dict[str, Any]) -> HeadConfig | None:
        """The typed configuration of these fields; `DraftConfigError` names each fault."""
        if self.config is None:
            if fields:
                raise DraftConfigError(
                    f"head has {', '.join(sorted(fields))}; this architecture has no head: remove them"
                )
            return None
        try:
            return self.config(**fields)
        except ValidationError as error:
            raise DraftConfigError(describe(error, "the draft's head", self.config.model_fields)) from None
