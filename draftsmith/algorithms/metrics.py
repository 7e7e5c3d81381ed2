"""The teacher-forced metrics that every objective reports."""

from torch import Tensor

from draftsmith.blocks.accept import leading_correct
from draftsmith.blocks.blocks import Blocks


def label_metrics(predicted: Tensor, blocks: Blocks) -> dict[str, tuple[Tensor, Tensor]]:
    """predicted [R, N, P] int64, the draft's choice for every label -> name -> (numerator, denominator), float32.

    `accuracy`: [P], right labels over supervised labels, label by label. `accept_length`: scalars, tokens that the
    verify of a block would commit (leading right labels, plus the bonus token) over blocks with a supervised label.
    """
    correct = (predicted == blocks.labels) & blocks.label_mask
    counted = blocks.label_mask.any(-1)  # [R, N]
    accepted = leading_correct(correct, blocks.label_mask, blocks.first_label)
    return {
        "accuracy": (correct.sum((0, 1)).float(), blocks.label_mask.sum((0, 1)).float()),
        "accept_length": (((accepted + 1) * counted).sum().float(), counted.sum().float()),
    }
