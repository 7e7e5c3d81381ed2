"""Features made while training: the same batches, the same losses, the same draft as from a store."""

import json

import pytest
import torch

from draftsmith.capture.online import OnlineFeatures
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.run import capture
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.training.record import find_checkpoint
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from tests.support.tiny import tiny_target
from tests.training.counting import QUIET, SYMBOLS, TAP_IDS, identity_of, options, section

CAPTURE = CaptureOptions(dtype="bfloat16", tokens_per_batch=64)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", vocab_size=19, num_layers=4)


def samples_of(count: int = 21, seed: int = 3) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(count):
        length = int(torch.randint(9, 24, (), generator=generator))
        ids = (torch.arange(length) + int(torch.randint(SYMBOLS, (), generator=generator))) % SYMBOLS
        samples.append(Sample(f"doc-{number}", ids, torch.arange(length) > 1))
    return samples


def layout_of(target) -> CaptureLayout:
    return CaptureLayout(TAP_IDS, target.hidden_size, final_state=False)


def provenance_of(target) -> Provenance:
    return Provenance(identity_of(target), None)


@pytest.fixture(scope="module")
def store(tmp_path_factory, target) -> Store:
    directory = tmp_path_factory.mktemp("offline") / "features"
    capture(target, samples_of(), layout_of(target), directory, CAPTURE, provenance_of(target))
    return Store.open(directory)


def online(target, cache=None, samples=None) -> OnlineFeatures:
    samples = samples or list(reversed(samples_of()))  # the order of the data must not matter
    return OnlineFeatures(target, samples, layout_of(target), CAPTURE, provenance_of(target), cache=cache)


def run(target, source, run_dir, resume=False, **fields):
    chosen = options(**{"max_steps": 11, "rows_per_step": 3, "eval_every": 5, "lr": 1e-3, **fields})
    train(
        section=section(),
        target=target,
        source=source,
        run_dir=run_dir,
        options=chosen,
        track=QUIET,
        provenance=Provenance(identity_of(target), None),
        resume=resume,
    )
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(entries):
    return [entry["loss"] for entry in entries]


def test_records_are_what_a_capture_stores(target, store):
    source = online(target)
    assert sorted(source.sample_ids) == sorted(store.sample_ids)
    documents = [4, 0, 17, 9, 20]
    for document, record in zip(documents, source.records(documents), strict=True):
        stored = store[store.index_of(source.sample_ids[document])]
        assert record.sample_id == stored.sample_id
        assert torch.equal(record.input_ids, stored.input_ids)
        assert torch.equal(record.loss_mask, stored.loss_mask)
        assert record.features["taps"].dtype == torch.bfloat16
        torch.testing.assert_close(record.features["taps"], stored.features["taps"], rtol=2**-7, atol=2**-7)


def test_online_training_is_offline_training(target, store, tmp_path):
    """To bf16 rounding: the target's batches differ, so a feature may round the other way."""
    offline = run(target, StoreSource(store), tmp_path / "offline")
    live = run(target, online(target), tmp_path / "online")
    assert [entry["step"] for entry in live] == [entry["step"] for entry in offline]
    worst = max(abs(a - b) for a, b in zip(losses(live), losses(offline), strict=True))
    print("largest difference of losses", worst)
    assert worst < 2e-3
    assert losses(offline)[-1] < losses(offline)[0] - 0.05  # there is something to differ about
    other = run(target, online(target), tmp_path / "seed", seed=1)
    assert max(abs(a - b) for a, b in zip(losses(other), losses(offline), strict=True)) > 2e-2


def test_a_cache_is_filled_once_and_then_read(target, tmp_path, monkeypatch):
    plain = run(target, online(target), tmp_path / "plain")
    source = online(target, cache=tmp_path / "cache")
    cached = run(target, source, tmp_path / "cached")
    source.close()
    assert losses(cached) == pytest.approx(losses(plain), abs=2e-3)
    kept = Store.open(tmp_path / "cache")
    assert sorted(kept.sample_ids) == sorted(source.sample_ids)
    # A second run over the same cache needs the target no more.
    again = online(target, cache=tmp_path / "cache")
    monkeypatch.setattr(again._backend, "features", None)
    assert losses(run(target, again, tmp_path / "again")) == pytest.approx(losses(plain), abs=2e-3)


def test_a_cache_left_half_full_is_gone_on_with(target, tmp_path):
    source = online(target, cache=tmp_path / "cache")
    source.records([3, 7])
    source.close()
    again = online(target, cache=tmp_path / "cache")
    again.records(list(range(len(again.sample_ids))))
    assert len(Store.open(tmp_path / "cache")) == len(again.sample_ids)
    with pytest.raises(DraftsmithError, match="not in the data"):
        online(target, cache=tmp_path / "cache", samples=samples_of(count=5, seed=4)[:4])


def test_a_resumed_online_run_is_bit_identical_and_knows_its_data(target, tmp_path):
    run(target, online(target), tmp_path / "straight")
    run(target, online(target), tmp_path / "resumed", save_every=7, keep_last=5)
    for name in ("step-00000014", "step-00000015", "step-00000016"):
        path = tmp_path / "resumed" / "checkpoints" / name
        if path.exists():
            path.rename(path.with_suffix(".gone"))
    run(target, online(target), tmp_path / "resumed", resume=True)
    a, b = (find_checkpoint(tmp_path / name, "last").weights() for name in ("straight", "resumed"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(DraftsmithError, match="the feature store"):
        run(target, online(target, samples=samples_of(seed=8)), tmp_path / "resumed", resume=True)


def test_a_document_with_infinite_features_is_named(target):
    source = online(target)
    genuine = source._backend.features

    class Broken:
        def features(self, samples):
            found = genuine(samples)
            for sample, features in zip(samples, found, strict=True):
                if sample.id == "doc-6":
                    features["taps"][1, 0] = float("inf")
            return found

    source._backend = Broken()
    assert source.records([source.sample_ids.index("doc-5")])
    with pytest.raises(DraftsmithError, match="NaN or Inf for sample 'doc-6'"):
        source.records(range(len(source.sample_ids)))
