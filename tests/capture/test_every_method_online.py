"""Every method learns from features that the local target makes: from a store, and while it trains."""

import json
from pathlib import Path

import pytest
import torch

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import algorithm
from draftsmith.capture.online import OnlineFeatures
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.run import capture
from draftsmith.data.sample import Sample
from draftsmith.features.identity import Provenance
from draftsmith.features.reader import Store
from draftsmith.targets.target import Target
from draftsmith.training.run import train
from draftsmith.training.source import FeatureSource, StoreSource
from tests.support.every_method import METHODS, section_of
from tests.support.tiny import tiny_target
from tests.training.counting import QUIET, identity_of, options

OPTIONS = CaptureOptions(dtype="float32", tokens_per_batch=64)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", vocab_size=19)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(18, (length,), generator=generator) for length in (23, 11, 17, 9, 20, 14, 19)]
    return [Sample(f"doc-{number}", ids, torch.arange(len(ids)) > 1) for number, ids in enumerate(texts)]


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if entry["kind"] == "train"]


@pytest.mark.parametrize("method", METHODS)
def test_online_training_is_training_from_a_capture(
    target: Target, samples: list[Sample], method: str, tmp_path: Path
) -> None:
    section = section_of(method, mask_token_id=18, block_size=4)
    layout = algorithm(method).capture(draft_config(section, target.info))
    provenance = Provenance(identity_of(target), None)
    capture(target, samples, layout, tmp_path / "features", OPTIONS, provenance)

    def run(source: FeatureSource, name: str, **fields: int) -> list[float]:
        train(
            section=section,
            target=target,
            source=source,
            run_dir=tmp_path / name,
            options=options(**{"max_steps": 2, "eval_share": 0.0, **fields}),
            track=QUIET,
            provenance=Provenance(identity_of(target), None),
        )
        return losses(tmp_path / name)

    stored = run(StoreSource(Store.open(tmp_path / "features")), "stored")
    live = OnlineFeatures(target, samples, layout, OPTIONS, provenance)
    assert len(stored) == 2
    assert run(live, "live") == pytest.approx(stored, rel=1e-4)
    assert run(live, "other", max_steps=1, seed=1) != pytest.approx(stored[:1], rel=1e-4)
