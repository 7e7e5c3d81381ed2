"""Capture on a GPU: what travels beside the forward arrives whole, in the right rows, and only finite."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.capture.hf import HfBackend
from draftsmith.capture.plan import plan_batches
from draftsmith.capture.refusals import Reason
from draftsmith.features.encoding import decode, encode
from draftsmith.features.manifest import STORE_DTYPES
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.verify import verify_store
from draftsmith.targets.target import Target
from tests.capture.samples import random_samples, run_capture
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
LENGTHS = [3 + (37 * number) % 301 for number in range(120)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8"])
def test_a_store_holds_what_the_target_computed(tmp_path: Path, dtype: str) -> None:
    target = Target.from_model(tiny_model().to(DEVICE))
    layout = CaptureLayout((2, 0), 32, final_state=True, dtype=STORE_DTYPES[dtype])
    samples = random_samples(LENGTHS)
    run_capture(target, samples, layout, tmp_path, dtype=dtype, tokens_per_batch=700, shard_bytes=200_000)
    assert verify_store(tmp_path) == []
    store = Store.open(tmp_path)
    assert len(store) == len(samples)
    backend = HfBackend(target, layout)
    for batch in plan_batches(samples, 700):
        for sample, features in zip(batch, backend.features(batch), strict=True):
            record = store[store.index_of(sample.id)]
            # Encoded on the CPU here: the device's rounding is the same, bit for bit.
            wanted = decode(encode({name: t.cpu() for name, t in features.items()}, layout), layout, layout.widths)
            assert torch.equal(record.input_ids, sample.input_ids)
            for name in layout.widths:
                assert torch.equal(record.features[name], wanted[name]), (sample.id, name)


def test_features_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    target = Target.from_model(tiny_model().to(DEVICE))
    with torch.no_grad():
        target.model.model.embed_tokens.weight[96] = float("nan")
    samples = random_samples(LENGTHS, vocab_size=96)
    spoilt = samples[7].input_ids.clone()
    spoilt[2] = 96
    samples[7] = replace(samples[7], input_ids=spoilt)
    layout = CaptureLayout((1,), 32, final_state=False)
    report = run_capture(target, samples, layout, tmp_path, dtype="fp8", tokens_per_batch=700, max_refused_share=0.1)
    assert report.refused == {Reason.NOT_FINITE: (samples[7].id,)}
    assert report.captured == len(samples) - 1
