"""The recipe's `export` section."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.drafts.config import DraftConfig
from draftsmith.errors import DraftsmithError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RopeScaling(_Section):
    """YaRN (arXiv 2309.00071): positions up to `factor` times those that the draft was trained for.

    `original_max_position_embeddings` None: the draft's `max_position_embeddings`. The target must be served with the
    same scaling. `attention_factor`, `beta_fast` and `beta_slow` None: what YaRN's readers take for an absent field.
    """

    rope_type: Literal["yarn"] = "yarn"
    factor: float = Field(gt=1.0, allow_inf_nan=False)
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    attention_factor: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    beta_fast: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    beta_slow: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)

    def applied_to(self, config: DraftConfig) -> DraftConfig:
        """The configuration with this scaling; raises `DraftsmithError` where its rope is scaled already."""
        if config.rope.type != "default":
            raise DraftsmithError(
                f"export.rope_scaling asks for {self.rope_type!r}, but the draft was trained with rope_type "
                f"{config.rope.type!r} already ({config.rope.as_parameters()}); leave export.rope_scaling out"
            )
        original = self.original_max_position_embeddings or config.max_position_embeddings
        scaling = self.model_dump(exclude_none=True) | {"original_max_position_embeddings": original}
        return config.replace(
            rope=config.rope.as_parameters() | scaling, max_position_embeddings=int(original * self.factor)
        )


class ExportOptions(_Section):
    """What `export` writes.

    which: the run's `best` (highest held-out score) or `last` checkpoint. layout: of the files. rope_scaling: for
    contexts longer than those of training.
    """

    which: Literal["best", "last"] = "best"
    layout: str = "zlab"
    rope_scaling: RopeScaling | None = None
