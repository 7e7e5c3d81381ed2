"""Damage is never read as data (trap 19), and every refusal names what it refuses."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.features.files import file_entry
from draftsmith.features.manifest import StoreError, StoreManifest, read_manifest, to_json
from draftsmith.features.reader import Store
from draftsmith.features.record import Record
from draftsmith.features.schema import FP8
from draftsmith.features.verify import verify_store

from . import stores

READ_FILES = ("manifest.json", "index", "tokens", "features")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    stores.write_store(directory, stores.records([3, 9, 4, 12, 1, 7], stores.layout()), stores.layout())
    return directory


@pytest.fixture(scope="module")
def sound_8_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound8")
    layout = stores.layout(dtype=FP8)
    stores.write_store(directory, stores.records([3, 9, 4, 12, 1, 7], layout), layout, shard_bytes=200)
    return directory


def _flip(data: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.choice((1, 1, 1, 3))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def _truncate(data: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randrange(len(data))]


def _overwrite(data: bytearray, chance: random.Random) -> bytearray:
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.randrange(1, 64))
    data[start:end] = bytes(end - start)
    return data


@pytest.mark.parametrize("seed", range(200))
def test_damaged_files_never_give_a_wrong_record(sound: Path, sound_8_bits: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sound = chance.choice((sound, sound_8_bits))
    directory = tmp_path / "store"
    shutil.copytree(sound, directory)
    kind = READ_FILES[seed % len(READ_FILES)]
    path = chance.choice(sorted(path for path in directory.iterdir() if kind in path.name))
    before = path.read_bytes()
    damage: Callable[[bytearray, random.Random], bytearray] = chance.choice((_flip, _truncate, _overwrite))
    path.write_bytes(damage(bytearray(before), chance))
    originals = {item.sample_id: item for item in Store.open(sound)}

    read, fault = _read(directory)
    if fault is None:
        # The damage hit bytes that say nothing (padding, white space).
        assert len(read) == len(originals)
    else:
        assert str(directory) in fault
        assert verify_store(directory)
    assert all(stores.equal(item, originals[item.sample_id]) for item in read)


def _read(directory: Path) -> tuple[list[Record], str | None]:
    """The records that can be read, in order, and what stopped the reading."""
    read: list[Record] = []
    try:
        for item in Store.open(directory):
            read.append(item)
    except StoreError as error:
        return read, str(error)
    return read, None


def test_verify_names_every_damaged_file(sound: Path, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    shutil.copytree(sound, directory)
    victims = [sorted(directory.glob("*.features.safetensors"))[1], sorted(directory.glob("*.tokens.safetensors"))[0]]
    for path in victims:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    faults = verify_store(directory)
    assert len(faults) == 2
    assert all(any(str(path) in fault for fault in faults) for path in victims)


def test_other_documents_of_a_damaged_shard_are_still_read(sound: Path, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    shutil.copytree(sound, directory)
    path = sorted(directory.glob("*.features.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last document's taps
    path.write_bytes(data)
    store = Store.open(directory)
    last = store.manifest.shards[0].samples - 1
    assert last >= 1
    assert stores.equal(store[0], Store.open(sound)[0])
    for _ in range(2):  # a document counts as checked only when it was found whole
        with pytest.raises(StoreError, match=f"{path.name}.*CRC-32.*damaged"):
            store[last]
    assert store.checked.nonzero().flatten().tolist() == [0]


def test_bytes_that_claim_another_dtype_are_not_read(sound: Path, tmp_path: Path) -> None:
    """The values' checksum still holds then; only the manifest can tell."""
    directory = tmp_path / "store"
    shutil.copytree(sound, directory)
    path = sorted(directory.glob("*.features.safetensors"))[0]
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" '))
    with pytest.raises(StoreError, match=r"taps is \('F16', .* should be \('BF16'"):
        Store.open(directory)[0]


def test_a_missing_file_is_named(sound: Path, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    shutil.copytree(sound, directory)
    path = sorted(directory.glob("*.features.safetensors"))[0]
    path.unlink()
    with pytest.raises(StoreError, match=f"{path.name} is missing"):
        Store.open(directory)[0]
    with pytest.raises(StoreError, match=r"has no manifest\.json"):
        Store.open(tmp_path)


def _rewritten(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = directory / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(version=2), "version is 2; this draftsmith reads version 1"),
        (lambda values: values.update(format="other"), "format is 'other'"),
        (lambda values: values.update(tap_idss=[1]), "unknown keys tap_idss"),
        (lambda values: values["target"].update(colour="red"), "target.colour"),
        (lambda values: values.pop("hidden_size"), "hidden_size"),
        (lambda values: values.update(tap_convention="1-based"), "tap_convention"),
        (lambda values: values.update(samples=5), "samples is 5, but the shards hold 6"),
        (lambda values: values["target"].update(source="another"), "checksum"),
        (lambda values: values["index"].update(name="../index.safetensors"), "index.name"),
        (lambda values: values["shards"][0]["features_file"].update(name="/etc/passwd"), "shards.0.features_file.name"),
        (lambda values: values["shards"][0]["tokens_file"].update(name="a/../../b"), "shards.0.tokens_file.name"),
    ],
)
def test_manifests_that_are_not_right_are_refused_by_name(
    sound: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    directory = tmp_path / "store"
    shutil.copytree(sound, directory)
    _rewritten(directory, change)
    with pytest.raises(StoreError) as error:
        Store.open(directory)
    assert message in str(error.value)


def _forge(directory: Path, change: Callable[[dict[str, torch.Tensor]], None], kind: str) -> None:
    """Change a shard's file and give the manifest its new checksum: what only a look at the values can find."""
    manifest = read_manifest(directory)
    shard = manifest.shards[0]
    entry = shard.tokens_file if kind == "tokens_file" else shard.features_file
    tensors = load_file(directory / entry.name)
    change(tensors)
    save_file(tensors, directory / entry.name)
    new = shard.model_copy(update={kind: file_entry(directory / entry.name)})
    values = {**dict(manifest), "shards": (new, *manifest.shards[1:])}
    (directory / "manifest.json").write_bytes(to_json(StoreManifest(**values)))


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("tokens_file", "input_ids", stores.VOCABULARY, "token ids outside [0, 53)"),
        ("tokens_file", "loss_mask", 2, "loss_mask holds values other than 0 and 1"),
        ("tokens_file", "offsets", 1, "other document lengths than the index"),
        ("features_file", "taps", float("nan"), "taps holds NaN or Inf"),
        ("features_file", "final_state", float("inf"), "final_state holds NaN or Inf"),
        (
            "features_file",
            "taps",
            3.0,
            "taps of 1 samples has another CRC-32 than listed",
        ),
        (
            "tokens_file",
            "crc32.taps",
            3,
            "taps of 1 samples has another CRC-32 than listed",
        ),
    ],
)
def test_verify_checks_values(sound: Path, tmp_path: Path, kind: str, name: str, value: float, message: str) -> None:
    directory = tmp_path / "store"
    shutil.copytree(sound, directory)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[1] = value

    assert verify_store(directory) == []
    _forge(directory, change, kind)
    assert any(message in fault for fault in verify_store(directory))
