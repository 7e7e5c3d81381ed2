"""An interrupted capture is finished by the next one, and nothing is lost, repeated or mixed (trap 19)."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.capture.plan import finished_samples
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.manifest import StoreError
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import finish_store
from tests.features.stores import equal
from tests.support.tiny import tiny_target

from .samples import random_samples, run_capture

LAYOUT = CaptureLayout((1,), 32, final_state=True)
LENGTHS = (5, 9, 14, 3, 8, 21, 2, 11)


def _first_shards_only(directory: Path, count: int) -> None:
    """What a killed capture leaves: its first shards, no manifest."""
    for path in directory.glob("*.tokens.safetensors"):
        if int(path.name.split("-")[2].split(".")[0]) >= count:
            path.unlink()
    (directory / "manifest.json").unlink()


@pytest.mark.parametrize("shards_left", [0, 1, 3])
def test_a_resumed_capture_gives_the_bits_of_an_uninterrupted_one(tmp_path: Path, shards_left: int) -> None:
    target, samples = tiny_target(), random_samples(LENGTHS)
    options = {"dtype": "float32", "tokens_per_batch": 30, "shard_bytes": 4000}
    run_capture(target, samples, LAYOUT, tmp_path / "whole", **options)
    run_capture(target, samples, LAYOUT, tmp_path / "cut", **options)
    assert len(Store.open(tmp_path / "cut").manifest.shards) > 3
    _first_shards_only(tmp_path / "cut", shards_left)

    report = run_capture(target, samples, LAYOUT, tmp_path / "cut", **options)
    assert report.captured + report.resumed == len(samples)
    assert (report.resumed > 0) == (shards_left > 0)
    whole = {record.sample_id: record for record in Store.open(tmp_path / "whole")}
    again = {record.sample_id: record for record in Store.open(tmp_path / "cut")}
    assert whole.keys() == again.keys()
    assert all(equal(whole[sample_id], again[sample_id]) for sample_id in whole)


def test_a_finished_capture_computes_nothing_again(tmp_path: Path) -> None:
    target, samples = tiny_target(), random_samples(LENGTHS)
    run_capture(target, samples, LAYOUT, tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    forwards: list[int] = []
    target.model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))
    report = run_capture(target, samples, LAYOUT, tmp_path)
    assert (report.captured, report.resumed, forwards) == (0, len(samples), [])
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_more_samples_extend_a_finished_store(tmp_path: Path) -> None:
    target, samples = tiny_target(), random_samples(LENGTHS)
    run_capture(target, samples[:5], LAYOUT, tmp_path)
    report = run_capture(target, samples, LAYOUT, tmp_path)
    assert (report.captured, report.resumed) == (3, 5)
    assert sorted(Store.open(tmp_path).sample_ids) == sorted(sample.id for sample in samples)


def _other_tokens(sample: Sample) -> Sample:
    return replace(sample, input_ids=(sample.input_ids + 1) % 97)


def _other_mask(sample: Sample) -> Sample:
    return replace(sample, loss_mask=torch.cat([~sample.loss_mask[:1], sample.loss_mask[1:]]))


def _shorter(sample: Sample) -> Sample:
    return replace(
        sample, input_ids=sample.input_ids[:-1], loss_mask=torch.ones(len(sample.input_ids) - 1, dtype=torch.bool)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_tokens, "holds sample 's2' with other tokens"),
        (_shorter, "holds sample 's2' with other tokens"),
        (_other_mask, "holds sample 's2' with another loss mask"),
        (lambda sample: replace(sample, id="new"), "holds sample 's2', which is not in the data"),
    ],
)
def test_changed_data_is_not_mixed_with_what_is_there(tmp_path: Path, change: object, message: str) -> None:
    target, samples = tiny_target(), random_samples(LENGTHS)
    run_capture(target, samples, LAYOUT, tmp_path)
    samples[2] = change(samples[2])  # type: ignore[operator]
    with pytest.raises(DraftsmithError, match=message):
        run_capture(target, samples, LAYOUT, tmp_path)


def test_another_target_or_other_layers_are_not_mixed_with_what_is_there(tmp_path: Path) -> None:
    """Trap 21."""
    target, samples = tiny_target(), random_samples(LENGTHS)
    run_capture(target, samples, LAYOUT, tmp_path)
    with pytest.raises(StoreError, match=r"target\.weights_hash"):
        run_capture(tiny_target(seed=1), samples, LAYOUT, tmp_path)
    with pytest.raises(StoreError, match=r"tap_ids: the store has \(1,\), this run needs \(2,\)"):
        run_capture(target, samples, replace(LAYOUT, tap_ids=(2,)), tmp_path)
    with pytest.raises(StoreError, match="dtype: the store has 'bfloat16', this run needs 'float32'"):
        run_capture(target, samples, LAYOUT, tmp_path, dtype="float32")


def test_damage_to_an_unfinished_store_is_named_or_does_no_harm(tmp_path: Path) -> None:
    """Until a manifest stands, the data are what tokens files are compared with."""
    samples = random_samples(LENGTHS)
    layout = replace(LAYOUT, tap_ids=(0,))
    run_capture(tiny_target(num_layers=1), samples, layout, tmp_path, shard_bytes=4000)
    whole = {record.sample_id: record for record in Store.open(tmp_path)}
    path = sorted(tmp_path.glob("*.tokens.safetensors"))[1]
    sound, chance = path.read_bytes(), random.Random(7)
    outcomes: Counter[str] = Counter()
    for _ in range(150):
        (tmp_path / "manifest.json").unlink(missing_ok=True)
        damaged = bytearray(sound)
        start = chance.randrange(len(damaged))
        damaged[start] ^= 1 << chance.randrange(8)
        if chance.random() < 0.3:
            del damaged[start:]
        path.unlink()  # not in place: records read before are views of the file
        path.write_bytes(damaged)
        try:
            assert finished_samples(tmp_path, samples) == set(whole)
            finish_store(tmp_path)
            assert all(equal(record, whole[record.sample_id]) for record in Store.open(tmp_path))
            outcomes["harmless"] += 1
        except DraftsmithError:
            outcomes["named"] += 1
    assert outcomes["named"] > 100
    assert outcomes["harmless"] > 0
