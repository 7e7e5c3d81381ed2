"""The heads of the family: one file each, with a typed configuration and a module, found by the draft's
architecture."""

from draftsmith.drafts.heads.dflash2 import DFlash2Head, DFlash2HeadConfig, convolutions
from draftsmith.drafts.heads.domino import DominoHead, DominoHeadConfig
from draftsmith.drafts.heads.dspark import DSparkHead, DSparkHeadConfig
from draftsmith.drafts.heads.head import HeadConfig, HeadSpec

__all__ = ["HEADS", "HeadConfig", "HeadSpec"]

HEADS: dict[str, HeadSpec] = {
    "dflash": HeadSpec(),
    "dflash2": HeadSpec(DFlash2HeadConfig, DFlash2Head, convolutions),
    "domino": HeadSpec(DominoHeadConfig, DominoHead),
    "dspark": HeadSpec(DSparkHeadConfig, DSparkHead),
}
"""Architecture (`DraftConfig.architecture`) -> what it adds to the backbone."""
