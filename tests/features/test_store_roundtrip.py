"""What is written comes back, bit for bit, in any grouping into shards."""

import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from draftsmith.errors import DraftsmithError
from draftsmith.features import reader
from draftsmith.features.manifest import StoreError
from draftsmith.features.reader import Store
from draftsmith.features.schema import FP8
from draftsmith.features.verify import verify_store

from . import stores


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    shard_bytes=st.integers(1, 3000),
    final_state=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, FP8]),
    seed=st.integers(0, 1000),
)
def test_records_come_back_bit_for_bit(
    lengths: list[int], shard_bytes: int, final_state: bool, dtype: torch.dtype, seed: int
) -> None:
    layout = stores.layout(final_state, dtype)
    written = stores.records(lengths, layout, seed)
    with tempfile.TemporaryDirectory() as directory:
        manifest = stores.write_store(Path(directory), written, layout, shard_bytes)
        store = Store.open(directory)
        assert len(store) == manifest.samples == len(lengths)
        assert store.lengths == lengths
        assert store.supervised == [int(item.loss_mask.sum()) for item in written]
        assert manifest.tokens == sum(lengths)
        assert manifest.supervised_tokens == sum(store.supervised)
        assert all(stores.equal(stores.as_read(a, layout), b) for a, b in zip(written, store, strict=True))
        assert manifest.bytes == sum(
            path.stat().st_size for path in Path(directory).iterdir() if path.suffix == ".safetensors"
        )
        assert verify_store(directory) == []
        for shard in manifest.shards:
            assert shard.samples == 1 or shard.tokens * layout.bytes_per_token <= shard_bytes


def test_equality_of_records_sees_one_changed_value(tmp_path: Path) -> None:
    layout = stores.layout()
    written = stores.records([5, 7, 1], layout)
    stores.write_store(tmp_path, written, layout)
    read = Store.open(tmp_path)[1]
    taps = read.features["taps"].clone()
    taps[6, 5] += 1
    assert stores.equal(written[1], read)
    assert not stores.equal(written[1], replace(read, features={**read.features, "taps": taps}))


def test_random_access_by_number_and_by_id(tmp_path: Path) -> None:
    layout = stores.layout()
    written = stores.records([3, 9, 4, 1, 7], layout)
    stores.write_store(tmp_path, written, layout, shard_bytes=150)
    store = Store.open(tmp_path)
    for number in (3, 0, 4, -1, -5, 2):
        assert stores.equal(store[number], written[number])
    for number, item in enumerate(written):
        assert store.index_of(item.sample_id) == number
    with pytest.raises(IndexError):
        store[5]
    with pytest.raises(IndexError):
        store[-6]
    with pytest.raises(DraftsmithError, match="no sample 'absent' among its 5"):
        store.index_of("absent")


def test_only_the_features_asked_for_are_read(tmp_path: Path) -> None:
    layout = stores.layout(final_state=True)
    written = stores.records([3, 9], layout)
    stores.write_store(tmp_path, written, layout)
    assert set(Store.open(tmp_path, ("taps",))[0].features) == {"taps"}
    stores.write_store(tmp_path / "narrow", stores.records([3], stores.layout(False)), stores.layout(False))
    with pytest.raises(StoreError, match="does not hold final_state; it holds taps"):
        Store.open(tmp_path / "narrow", ("taps", "final_state"))


def test_features_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    layout = stores.layout()
    stores.write_store(tmp_path, stores.records([30, 40], layout), layout, shard_bytes=1 << 20)
    first, second = Store.open(tmp_path)
    assert first.features["taps"].untyped_storage().data_ptr() == second.features["taps"].untyped_storage().data_ptr()


def test_a_store_pickles_and_keeps_few_shards_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_OPEN_SHARDS", 2)
    layout = stores.layout()
    written = stores.records([4, 5, 6, 7, 8], layout)
    manifest = stores.write_store(tmp_path, written, layout, shard_bytes=1)
    assert len(manifest.shards) == 5
    store = Store.open(tmp_path)
    assert all(stores.equal(a, b) for a, b in zip(written, store, strict=True))
    assert len(store._open) == 2
    again = pickle.loads(pickle.dumps(store))
    assert all(stores.equal(a, b) for a, b in zip(written, again, strict=True))


def test_shards_are_plain_safetensors_as_documented(tmp_path: Path) -> None:
    layout = stores.layout()
    written = stores.records([3, 9], layout)
    manifest = stores.write_store(tmp_path, written, layout, shard_bytes=1 << 20)
    (shard,) = manifest.shards
    tokens = load_file(tmp_path / shard.tokens_file.name)
    features = load_file(tmp_path / shard.features_file.name)
    assert {name: (tensor.dtype, list(tensor.shape)) for name, tensor in features.items()} == {
        "taps": (torch.bfloat16, [12, 6]),
        "final_state": (torch.bfloat16, [12, 3]),
    }
    assert tokens["input_ids"].dtype == torch.int32
    assert tokens["loss_mask"].dtype == torch.uint8
    assert tokens["offsets"].tolist() == [0, 3, 12]
    assert torch.equal(tokens["input_ids"].long(), torch.cat([item.input_ids for item in written]))
    assert torch.equal(features["taps"], torch.cat([item.features["taps"] for item in written]))
