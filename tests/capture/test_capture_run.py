"""Capture as a whole: batches, refusals, room on the disk, the report."""

import json
import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from draftsmith.base.readable import readable_bytes, readable_duration
from draftsmith.capture import plan
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.pipeline import REHEARSED
from draftsmith.capture.plan import estimate_size, plan_batches
from draftsmith.capture.refusals import Reason, shown_ids
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.encoding import finite_rows
from draftsmith.features.manifest import StoreError, read_header
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import HEADER_FILE, StoreWriter, finish_store
from draftsmith.features.verify import verify_store
from tests.support.tiny import tiny_target

from .samples import random_samples, run_capture

LAYOUT = CaptureLayout((1,), 32, final_state=False)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), budget=st.integers(1, 200))
def test_batches_hold_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    samples = random_samples(lengths)
    batches = plan_batches(samples, budget)
    assert sorted(sample.id for batch in batches for sample in batch) == sorted(sample.id for sample in samples)
    for batch in batches:
        longest = max(len(sample.input_ids) for sample in batch)
        assert len(batch) == 1 or longest * len(batch) <= budget
    padded = sum(len(batch) * max(len(sample.input_ids) for sample in batch) for batch in batches)
    assert padded - sum(lengths) <= max(lengths) * max(map(len, batches))  # what sorting by length cannot avoid


@pytest.mark.parametrize(("count", "tokens_per_batch"), [(1, 8192), (3, 8192), (7, 30)])
def test_no_tail_is_dropped_and_less_than_a_batch_works(tmp_path: Path, count: int, tokens_per_batch: int) -> None:
    """Trap 18."""
    samples = random_samples([5 + number for number in range(count)])
    report = run_capture(tiny_target(), samples, LAYOUT, tmp_path, tokens_per_batch=tokens_per_batch)
    assert (report.captured, report.resumed, report.refused) == (count, 0, {})
    assert sorted(Store.open(tmp_path).sample_ids) == sorted(sample.id for sample in samples)
    assert verify_store(tmp_path) == []


def test_nothing_to_capture_is_an_error(tmp_path: Path) -> None:
    """Trap 18."""
    with pytest.raises(DraftsmithError, match="there are no samples to capture"):
        run_capture(tiny_target(), [], LAYOUT, tmp_path)
    unsupervised = [replace(sample, loss_mask=torch.zeros(5, dtype=torch.bool)) for sample in random_samples([5, 5])]
    with pytest.raises(DraftsmithError, match="2 of 2 samples cannot be captured"):
        run_capture(tiny_target(), unsupervised, LAYOUT, tmp_path, max_refused_share=1)
    assert not list(tmp_path.iterdir())


def _faulty_samples() -> list[Sample]:
    samples = random_samples([5, 6, 7, 8, 9, 10, 600, 5, 5])
    samples[1] = replace(samples[1], id="s0")
    samples[2].input_ids[3] = 97
    samples[3].input_ids[0] = -1
    samples[4] = replace(samples[4], loss_mask=torch.zeros(9, dtype=torch.bool))
    samples[5] = replace(
        samples[5], input_ids=torch.zeros(0, dtype=torch.int64), loss_mask=torch.zeros(0, dtype=torch.bool)
    )
    return samples


REFUSED = {
    Reason.DUPLICATE: ("s0",),
    Reason.OUTSIDE_VOCABULARY: ("s2", "s3"),
    Reason.UNSUPERVISED: ("s4",),
    Reason.EMPTY: ("s5",),
    Reason.TOO_LONG: ("s6",),
}


def test_unusable_samples_are_counted_and_listed(tmp_path: Path) -> None:
    report = run_capture(tiny_target(), _faulty_samples(), LAYOUT, tmp_path, max_refused_share=0.7)
    assert report.refused == REFUSED
    assert report.captured == 3
    store = Store.open(tmp_path)
    assert sorted(store.sample_ids) == ["s0", "s7", "s8"]
    assert torch.equal(store[store.index_of("s0")].input_ids, _faulty_samples()[0].input_ids)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["refused"]["outside_vocabulary"] == ["s2", "s3"]
    assert any("2 refused: token ids outside the target's vocabulary: s2, s3" in line for line in report.lines())


def test_a_line_shows_the_first_of_many_ids() -> None:
    assert shown_ids(list("abcde")) == "a, b, c, d, e"
    assert shown_ids(list("abcdef")) == "a, b, c, d, e, ..."


def test_too_many_unusable_samples_stop_the_capture_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError) as error:
        run_capture(tiny_target(), _faulty_samples(), LAYOUT, tmp_path / "store", max_refused_share=0.5)
    assert "6 of 9 samples cannot be captured" in str(error.value)
    assert all(reason in str(error.value) for reason in REFUSED)
    assert not (tmp_path / "store").exists()


def _poison(target: object, token: int, value: float) -> None:
    """Make the embedding of one token, and with it every feature after it, not a number."""
    with torch.no_grad():
        target.model.model.embed_tokens.weight[token] = value  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_never_stored(tmp_path: Path, value: float) -> None:
    """Trap 20: found at once, and only the samples concerned are refused, not their neighbours in the batch."""
    target = tiny_target()
    samples = random_samples([6, 9, 8, 7], vocab_size=96)
    samples[2].input_ids[4] = 96
    _poison(target, 96, value)
    report = run_capture(target, samples, LAYOUT, tmp_path / "store", max_refused_share=0.25)
    assert report.refused == {Reason.NOT_FINITE: ("s2",)}
    assert sorted(Store.open(tmp_path / "store").sample_ids) == ["s0", "s1", "s3"]
    assert verify_store(tmp_path / "store") == []


def test_too_many_features_that_are_not_finite_stop_the_capture_at_once(tmp_path: Path) -> None:
    target = tiny_target()
    samples = random_samples(range(20, 0, -1), vocab_size=96)
    samples[3].input_ids[4] = 96
    _poison(target, 96, float("nan"))
    forwards: list[int] = []
    target.model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))
    with pytest.raises(DraftsmithError, match="1 of 20 samples cannot be captured: 1 with features with NaN or Inf"):
        run_capture(target, samples, LAYOUT, tmp_path, tokens_per_batch=1)
    assert len(forwards) == 4
    with pytest.raises(StoreError, match="has not finished"):
        Store.open(tmp_path)
    # What was finished by then is there for the next run, which computes only the rest.
    report = run_capture(target, samples, LAYOUT, tmp_path, tokens_per_batch=1, max_refused_share=0.05)
    assert (report.captured, report.resumed) == (16, 3)


def test_the_finite_check_reads_every_feature() -> None:
    def features(spoilt: bool) -> dict[str, Tensor]:
        final = torch.zeros(4, 2)
        final[3, 1] = float("inf") if spoilt else 1.0
        return {"taps": torch.ones(4, 6), "final_state": final}

    assert finite_rows(features(False)).tolist() == [True] * 4
    assert finite_rows(features(True)).tolist() == [True, True, True, False]


def test_a_full_disk_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 23: both numbers are said, before any work."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 10_000))
    samples = random_samples([200, 300])
    with pytest.raises(DraftsmithError) as error:
        run_capture(tiny_target(), samples, LAYOUT, tmp_path / "store")
    assert "33.9 KiB for 500 tokens of 64 bytes" in str(error.value)
    assert "9.8 KiB are free" in str(error.value)
    assert not (tmp_path / "store").exists()
    assert run_capture(tiny_target(), samples, LAYOUT, tmp_path / "store", force=True).captured == 2


@pytest.mark.parametrize("count", [3, 30])
def test_size_and_time_are_said_before_anything_is_stored(
    count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From 20 batches on the first forward, which also loads kernels, is not what is timed."""
    target, forwards = tiny_target(), []
    target.model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))
    with caplog.at_level("INFO", "draftsmith"):
        run_capture(target, random_samples([9] * count), LAYOUT, tmp_path, tokens_per_batch=9)
    size, time = (record.getMessage() for record in caplog.records)
    assert f"{count} samples, {9 * count} tokens" in size
    assert "to be written" in size
    assert "free" in size
    assert re.search(r"about .* s at [\d,]+ tokens/s, if the disk takes .*/s", time)
    assert len(forwards) == count + (count > REHEARSED)


def test_durations_are_readable() -> None:
    assert [readable_duration(seconds) for seconds in (0.4, 119, 130, 7300, 200_000)] == [
        "0 s",
        "119 s",
        "2 min",
        "2.0 h",
        "2.3 days",
    ]


def test_the_estimate_is_close(tmp_path: Path) -> None:
    samples = random_samples([100 + number for number in range(40)])
    layout = CaptureLayout((0, 1, 2), 32, final_state=True)
    estimate = estimate_size(samples, layout, tmp_path / "not" / "there")
    report = run_capture(tiny_target(), samples, layout, tmp_path / "store")
    assert estimate.tokens == report.manifest.tokens == sum(len(sample.input_ids) for sample in samples)
    assert estimate.bytes == pytest.approx(report.manifest.bytes, rel=0.02)
    assert estimate.free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)


def test_bytes_are_readable() -> None:
    assert [readable_bytes(count) for count in (0, 1023, 1024, 3 << 29, 5 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 GiB",
        "5.0 TiB",
    ]


def test_a_fault_while_storing_ends_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.base import files

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(files.WriteError, match="No space left on device"):
        run_capture(tiny_target(), random_samples([5] * 40), LAYOUT, tmp_path, shard_bytes=1, tokens_per_batch=5)


@pytest.mark.parametrize(
    "values",
    [{"dtype": "float16"}, {"shard_bytes": 0}, {"max_refused_share": 1.5}, {"backend": "other"}, {"colour": 1}],
)
def test_options_that_are_not_right_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        CaptureOptions.model_validate(values)


def test_a_process_of_an_earlier_capture_that_still_writes_is_waited_for(tmp_path: Path) -> None:
    samples, target = random_samples([5, 9, 7, 3]), tiny_target()
    run_capture(target, samples[:2], LAYOUT, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with (
        StoreWriter(tmp_path, read_header(tmp_path / HEADER_FILE), number=5),
        pytest.raises(StoreError, match="another process is writing"),
    ):
        run_capture(target, samples, LAYOUT, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "writer-0005.lock"])
    assert run_capture(target, samples, LAYOUT, tmp_path).captured == 2


def test_a_store_that_is_written_into_is_not_finished(tmp_path: Path) -> None:
    run_capture(tiny_target(), random_samples([5, 9]), LAYOUT, tmp_path)
    with (
        StoreWriter(tmp_path, read_header(tmp_path / HEADER_FILE), number=1),
        pytest.raises(StoreError, match="another process is writing"),
    ):
        finish_store(tmp_path)
    assert finish_store(tmp_path).samples == 2
