"""Random samples for capture tests."""

from collections.abc import Sequence
from pathlib import Path

import torch

from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.report import CaptureReport
from draftsmith.capture.run import capture
from draftsmith.data.sample import Sample
from draftsmith.features.identity import Provenance, target_identity
from draftsmith.features.schema import CaptureLayout
from draftsmith.targets.target import Target


def random_samples(lengths: Sequence[int], vocab_size: int = 97, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number, length in enumerate(lengths):
        loss_mask = torch.rand(length, generator=generator) < 0.7
        loss_mask[-1] = True
        samples.append(Sample(f"s{number}", torch.randint(0, vocab_size, (length,), generator=generator), loss_mask))
    return samples


def provenance(target: Target) -> Provenance:
    return Provenance(target_identity(target.source, None, target.text_config, target.ends.head_weight), None)


def run_capture(
    target: Target, samples: Sequence[Sample], layout: CaptureLayout, directory: Path, **options: object
) -> CaptureReport:
    return capture(target, samples, layout, directory, CaptureOptions.model_validate(options), provenance(target))
