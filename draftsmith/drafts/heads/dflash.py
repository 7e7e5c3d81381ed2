"""DFlash has no head: every slot is predicted by the target's output head alone (arXiv 2602.06036)."""

from draftsmith.drafts.heads.head import HeadConfig
from draftsmith.layouts.consumers import BARE, SINKS_ONLY, UNSCALED
from draftsmith.layouts.spelling import HeadSpelling, SpeculatorsSpelling


class DFlashHeadConfig(HeadConfig):
    """Nothing beside the backbone."""

    architecture = "dflash"
    spelling = HeadSpelling(
        "DFlashDraftModel",
        speculators=SpeculatorsSpelling("DFlashSpeculator", sample_from_anchor=False),
        served={
            # Multiplier and soft-cap keep the order of logits, so that a plain argmax is the same without them.
            "sglang": {},
            "vllm": UNSCALED,
            "speculators": BARE,
            "vllm-speculators": BARE,
            "modelopt": SINKS_ONLY,
        },
    )
