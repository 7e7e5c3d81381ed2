"""`--remask`: new loss masks into a store, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.capture.remask import RemaskReport, remask
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features import remask as rewriting
from draftsmith.features.manifest import FileEntry, StoreError, TokenizerIdentity, read_header
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import HEADER_FILE, StoreWriter, write_tokens
from draftsmith.features.tables import ShardTokens
from draftsmith.features.verify import verify_store
from tests.support.tiny import tiny_target

from .samples import provenance, random_samples, run_capture

LAYOUT = CaptureLayout((1,), 32, final_state=False)
LENGTHS = (5, 9, 14, 3, 8, 21, 2, 11)
OPTIONS = {"tokens_per_batch": 30, "shard_bytes": 1000}


def shifted(samples: list[Sample]) -> list[Sample]:
    """The same samples with other masks of the same sums."""
    return [replace(sample, loss_mask=sample.loss_mask.roll(1)) for sample in samples]


def run(directory: Path, samples: list[Sample], share: float = 0.0, seed: int = 0) -> RemaskReport:
    origin = provenance(tiny_target(seed=seed))
    return remask(directory, samples, origin, max_length=512, max_refused_share=share)


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    samples = random_samples(LENGTHS)
    run_capture(tiny_target(), samples, LAYOUT, tmp_path, **OPTIONS)
    return samples


def test_masks_are_new_and_features_are_the_same(tmp_path: Path, samples: list[Sample]) -> None:
    before, new = Store.open(tmp_path), shifted(samples)
    records = list(before)
    features = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.features.safetensors")}
    report = run(tmp_path, new)
    assert (report.documents, report.finished, report.unsupervised) == (len(samples), True, ())
    assert report.changed == sum(not torch.equal(a.loss_mask, b.loss_mask) for a, b in zip(samples, new, strict=True))
    assert report.changed > 3
    after = Store.open(tmp_path)
    assert verify_store(tmp_path) == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.features.safetensors")} == features
    wanted = {sample.id: sample.loss_mask for sample in new}
    for old, record in zip(records, after, strict=True):
        assert record.sample_id == old.sample_id
        assert torch.equal(record.loss_mask, wanted[record.sample_id])
        assert torch.equal(record.features["taps"], old.features["taps"])
    # By the index's checksum a training tells that its store is another one, also where no sum has changed.
    assert after.supervised == before.supervised
    assert after.manifest.index.sha256 != before.manifest.index.sha256
    assert run_capture(tiny_target(), new, LAYOUT, tmp_path, **OPTIONS).captured == 0


def test_a_remask_that_was_killed_is_finished_by_the_next(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def killed(path: Path, tokens: ShardTokens, features: FileEntry) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write_tokens(path, tokens, features)

    with monkeypatch.context() as patch:
        patch.setattr(rewriting, "write_tokens", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, shifted(samples))
    with pytest.raises(StoreError, match="has not finished"):  # old and new masks are not read side by side
        Store.open(tmp_path)
    with pytest.raises(DraftsmithError, match=r"another loss mask.*--remask"):
        run_capture(tiny_target(), shifted(samples), LAYOUT, tmp_path, **OPTIONS)
    assert run(tmp_path, shifted(samples)).finished
    wanted = {sample.id: sample.loss_mask for sample in shifted(samples)}
    assert all(torch.equal(record.loss_mask, wanted[record.sample_id]) for record in Store.open(tmp_path))


@pytest.mark.parametrize("number", [0, 3])
def test_a_store_that_is_written_into_is_not_touched(tmp_path: Path, samples: list[Sample], number: int) -> None:
    before = (tmp_path / "manifest.json").read_bytes()
    header = read_header(tmp_path / HEADER_FILE)
    with StoreWriter(tmp_path, header, number=number), pytest.raises(StoreError, match="another process is writing"):
        run(tmp_path, shifted(samples))
    assert (tmp_path / "manifest.json").read_bytes() == before
    assert run(tmp_path, shifted(samples)).changed > 0


def test_no_writer_begins_before_the_masks_are_written(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    header, refused = read_header(tmp_path / HEADER_FILE), []

    def meanwhile(path: Path, tokens: ShardTokens, features: FileEntry) -> None:
        with pytest.raises(StoreError, match="another process is writing"):
            StoreWriter(tmp_path, header)
        refused.append(path.name)
        write_tokens(path, tokens, features)

    monkeypatch.setattr(rewriting, "write_tokens", meanwhile)
    assert run(tmp_path, shifted(samples)).finished
    assert len(refused) > 1


def test_an_unfinished_capture_stays_one(tmp_path: Path, samples: list[Sample]) -> None:
    last = sorted(tmp_path.glob("*.tokens.safetensors"))[-1]
    last.unlink()
    (tmp_path / "manifest.json").unlink()
    report = run(tmp_path, shifted(samples))
    assert not report.finished
    assert any("draftsmith capture" in line for line in report.lines())
    with pytest.raises(StoreError, match="has not finished"):
        Store.open(tmp_path)
    assert run_capture(tiny_target(), shifted(samples), LAYOUT, tmp_path, **OPTIONS).captured > 0
    assert len(Store.open(tmp_path)) == len(samples)


def test_documents_that_are_not_the_datas_own_are_not_touched(tmp_path: Path, samples: list[Sample]) -> None:
    before = (tmp_path / "manifest.json").read_bytes()
    other = shifted(samples)
    other[2] = replace(other[2], input_ids=(other[2].input_ids + 1) % 97)
    with pytest.raises(DraftsmithError, match="holds sample 's2' with other tokens"):
        run(tmp_path, other)
    with pytest.raises(DraftsmithError, match="holds sample 's2', which is not in the data"):
        run(tmp_path, [sample for sample in samples if sample.id != "s2"])
    with pytest.raises(StoreError, match="weights_hash"):
        run(tmp_path, samples, seed=1)
    with pytest.raises(StoreError, match="holds no feature store"):
        run(tmp_path / "none", samples)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_documents_without_supervised_tokens_are_counted(tmp_path: Path, samples: list[Sample]) -> None:
    new = shifted(samples)
    new[4] = replace(new[4], loss_mask=torch.zeros(LENGTHS[4], dtype=torch.bool))
    with pytest.raises(DraftsmithError, match="1 of 8 samples cannot be captured: 1 with no supervised token \\(s4\\)"):
        run(tmp_path, new)
    assert run(tmp_path, new, share=0.2).unsupervised == ("s4",)
    store = Store.open(tmp_path)
    assert store.supervised[store.index_of("s4")] == 0


def test_the_template_of_the_masks_is_recorded(tmp_path: Path) -> None:
    samples, target = random_samples(LENGTHS), tiny_target()
    origin = replace(provenance(target), tokenizer=TokenizerIdentity(vocabulary_hash="3" * 64, template_hash="4" * 64))
    from draftsmith.capture.options import CaptureOptions
    from draftsmith.capture.run import capture

    capture(target, samples, LAYOUT, tmp_path, CaptureOptions(), origin)
    now = TokenizerIdentity(vocabulary_hash="3" * 64, template_hash="5" * 64)
    remask(tmp_path, shifted(samples), replace(origin, tokenizer=now), max_length=512, max_refused_share=0.0)
    assert Store.open(tmp_path).manifest.tokenizer == now
    other = TokenizerIdentity(vocabulary_hash="6" * 64, template_hash="5" * 64)
    with pytest.raises(StoreError, match="vocabulary_hash"):
        remask(tmp_path, samples, replace(origin, tokenizer=other), max_length=512, max_refused_share=0.0)
