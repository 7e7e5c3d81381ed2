"""What `draftsmith tune` found to be fastest, as a small JSON file that decoding reads."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftsmith.decoding.options import EngineOptions
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError

VERSION = 1


class Tuning(BaseModel):
    """Settings for one draft. method, trained_block_size: of the draft they are for; block_size: slots of the blocks to
    run (both None: it has no blocks); engine: the engine's options that were measured, tuned or not; found: how they
    were found (not read by decoding)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION
    method: str
    trained_block_size: int | None = Field(ge=2)
    block_size: int | None = Field(ge=2)
    engine: EngineOptions
    found: dict[str, Any] = {}

    @classmethod
    def read(cls, path: str | Path) -> "Tuning":
        """The settings in a file; raises `DraftsmithError` where there is none, or a damaged one."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            tuning = cls.model_validate(fields)
        except OSError as error:
            raise DraftsmithError(
                f"{path} cannot be read ({error.strerror}); give a file that `draftsmith tune` wrote"
            ) from error
        except (ValueError, ValidationError) as error:
            raise DraftsmithError(f"{path} is not a file that `draftsmith tune` wrote ({error})") from error
        if tuning.version != VERSION:
            raise DraftsmithError(
                f"{path} is of version {tuning.version}, and this draftsmith reads {VERSION}; tune again"
            )
        return tuning

    def write(self, path: Path) -> None:
        """Writes the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")

    def apply(self, draft: Draft, base: EngineOptions | None = None) -> tuple[Draft, EngineOptions]:
        """The draft with the tuned block, and the engine's options: the measured ones; of the proposer's, those of
        `base` that were not measured stay.

        Raises `DraftsmithError` where the settings are for another draft.
        """
        if (draft.config.architecture, block_size_of(draft)) != (self.method, self.trained_block_size):
            wanted = _named(self.method, self.trained_block_size)
            found = _named(draft.config.architecture, block_size_of(draft))
            raise DraftsmithError(f"the settings are for {wanted}, and this is {found}; tune again for it")
        proposer = (base or EngineOptions()).proposer | self.engine.proposer
        return sized(draft, self.block_size), self.engine.model_copy(update={"proposer": proposer})


def block_size_of(draft: Draft) -> int | None:
    """Slots of the draft's blocks, None where it has none."""
    return None if draft.config.block is None else draft.config.block.size


def sized(draft: Draft, block_size: int | None) -> Draft:
    """The draft with blocks of this size; as it is for None."""
    return draft if block_size is None else draft.with_block_size(block_size)


def _named(method: str, block_size: int | None) -> str:
    return f"a {method} draft" + ("" if block_size is None else f" with blocks of {block_size}")
