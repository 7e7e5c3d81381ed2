"""DTA: DFlash trained with a visible prefix of random length in every block (the VP-Drafter of D2SD, arXiv 2606.04446).

Network, features, decoding and export are DFlash's; only the training blocks differ.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from draftsmith.algorithms.dflash import PlainBlocks, PlainSection
from draftsmith.blocks.anchors import VisibleSlots
from draftsmith.drafts.config import DraftConfig
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import CaptureLayout


class DTASection(PlainSection):
    """The recipe's `draft` section for DTA. A prefix of v slots, v in {2, ..., B-1}, is drawn with probability
    proportional to `visible_base`^v; decay weights count from slot v."""

    algorithm: Literal["dta"] = "dta"
    visible_base: float = Field(default=0.9, gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class VisiblePrefix:
    """Draws visible slots: v in {2, ..., B-1}, with probability proportional to base^v. Raises `DraftsmithError` for a
    block that has no such v."""

    base: float
    block_size: int

    def __post_init__(self) -> None:
        _check_room(self.block_size)

    def __call__(self, generator: np.random.Generator, count: int) -> np.ndarray:
        lengths = np.arange(2, self.block_size)
        powers = lengths * np.log(self.base)
        chances = np.exp(powers - powers.max())  # the largest is 1: no base overflows
        return generator.choice(lengths, size=count, p=chances / chances.sum())


class DTA(PlainBlocks[DTASection]):
    """DFlash in everything but the training blocks, of which the first slots carry their true tokens."""

    name = "dta"
    summary = "DFlash trained with a visible prefix of random length in every block"
    paper = "arXiv 2606.04446"
    section = DTASection

    def capture(self, config: DraftConfig) -> CaptureLayout:
        """DFlash's; a block too small to train is refused here, before the target runs."""
        _check_room(config.block_for("dta").size)
        return super().capture(config)

    def visible_slots(self, section: DTASection, block_size: int) -> VisibleSlots:
        return VisiblePrefix(section.visible_base, block_size)


def _check_room(block_size: int) -> None:
    if block_size < 3:
        raise DraftsmithError(
            f"block_size is {block_size}; dta shows at least 2 slots of a block and predicts the rest: it needs 3"
        )
