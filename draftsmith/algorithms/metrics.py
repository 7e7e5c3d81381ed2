"""The teacher-forced metrics that every objective reports."""

import torch
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


CALIBRATION_BINS = 10


def acceptance_metrics(acceptance: Tensor, blocks: Blocks) -> dict[str, tuple[Tensor, Tensor]]:
    """acceptance [R, N, P] float32, the chance that rejection sampling accepts each label's slot, 0 where the label is
    not supervised -> name -> (numerator, denominator), detached.

    `acceptance`: [P], its mean label by label. `expected_accept_length`: tokens that the verify of a block commits when
    sampling, sum_k prod_{j<=k} acceptance_j plus the bonus token, over blocks with a supervised label.
    """
    counted = blocks.label_mask.any(-1)  # [R, N]
    lengths = (acceptance * blocks.label_mask).cumprod(-1).sum(-1) + 1.0
    return {
        "acceptance": (acceptance.sum((0, 1)), blocks.label_mask.sum((0, 1)).float()),
        "expected_accept_length": ((lengths * counted).sum(), counted.sum().float()),
    }


def calibration_metrics(expected: Tensor, observed: Tensor, blocks: Blocks) -> dict[str, tuple[Tensor, Tensor]]:
    """How well a predicted chance of acceptance `expected` [R, N, P] fits the one found, `observed` [R, N, P] (both
    float32, detached, 0 where a label is not supervised).

    `confidence`: [P], the mean prediction label by label, to be held against `acceptance`; `confidence_error`: mean
    absolute difference; `calibration_expected` and `calibration_observed`: [10], the means of both over the labels
    whose prediction falls in [0, 0.1), [0.1, 0.2), ...: equal where the prediction can be trusted.
    """
    mask = blocks.label_mask
    bins = (expected * CALIBRATION_BINS).long().clamp_max(CALIBRATION_BINS - 1).flatten()
    empty = torch.zeros(CALIBRATION_BINS, device=expected.device)
    count = empty.index_add(0, bins, mask.float().flatten())
    return {
        "confidence": ((expected * mask).sum((0, 1)), mask.sum((0, 1)).float()),
        "confidence_error": (((expected - observed).abs() * mask).sum(), mask.sum().float()),
        "calibration_expected": (empty.index_add(0, bins, (expected * mask).flatten()), count),
        "calibration_observed": (empty.index_add(0, bins, (observed * mask).flatten()), count),
    }
