"""Draft directories as files: damage is noticed, paths stay inside, writes are whole or not at all."""

import json
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafts.directory import read_directory
from draftsmith.layouts import LayoutError, files
from tests.support.tiny_draft import tiny_draft

TARGET = SimpleNamespace(hidden_size=20, num_layers=5, vocab_size=61)
WEIGHTS = "model.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_draft(TARGET).save(tmp_path / "draft")
    return tmp_path / "draft"


def test_a_directory_that_fails_its_check_does_not_take_its_place(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    other = tiny_draft(TARGET, seed=1)
    seen = []

    def check(written: Path) -> None:
        seen.append(read_directory(written).tensors)
        raise LayoutError("it is wrong")

    with pytest.raises(LayoutError, match="it is wrong"):
        other.save(saved, check=check)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert torch.equal(seen[0]["norm.weight"], other.state_dict()["backbone.norm.weight"])
    other.save(saved, check=lambda written: None)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} != before


def shard(directory: Path) -> dict[str, torch.Tensor]:
    """Splits a directory's weights into two shards with an index; returns the tensors."""
    tensors = load_file(directory / WEIGHTS)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name].clone() for name in members}, directory / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (directory / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / WEIGHTS).unlink()
    return tensors


def edit_index(directory: Path, **changes: str | None) -> None:
    index = json.loads((directory / files.INDEX).read_text())
    index["weight_map"].update(changes)
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    (directory / files.INDEX).write_text(json.dumps(index))


def test_shards_equal_the_single_file(saved: Path) -> None:
    before = read_directory(saved)
    shard(saved)
    after = read_directory(saved)
    assert before.config == after.config
    assert set(before.tensors) == set(after.tensors)
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "c\\d.safetensors"]
)
def test_an_index_does_not_lead_out_of_the_directory(saved: Path, file: str) -> None:
    save_file(shard(saved), saved.parent / "other.safetensors")
    edit_index(saved, **{"fc.weight": file})
    with pytest.raises(LayoutError, match=r"fc\.weight is in .*the name of a file in the same directory"):
        read_directory(saved)


def test_an_index_names_only_safetensors(saved: Path) -> None:
    shard(saved)
    edit_index(saved, **{"fc.weight": "model.bin"})
    with pytest.raises(LayoutError, match=r"'model\.bin'; only \.safetensors"):
        read_directory(saved)


def test_a_missing_shard_is_named(saved: Path) -> None:
    shard(saved)
    (saved / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LayoutError, match=r"model-00002-of-00002\.safetensors does not exist"):
        read_directory(saved)


def test_an_index_that_disagrees_with_its_shards_is_refused(saved: Path) -> None:
    shard(saved)
    edit_index(saved, **{"norm.weight": None, "nothing.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(LayoutError, match=r"disagree: only in the index \['nothing\.weight'\]"):
        read_directory(saved)
    (saved / files.INDEX).write_text(json.dumps({"weight_map": []}))
    with pytest.raises(LayoutError, match=r"weight_map is \[\]"):
        read_directory(saved)


def test_two_sets_of_weights_are_refused(saved: Path) -> None:
    tensors = shard(saved)
    save_file(tensors, saved / WEIGHTS)
    with pytest.raises(LayoutError, match="holds both"):
        read_directory(saved)


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_weights_are_refused(saved: Path, keep: int) -> None:
    content = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(content[:keep])
    with pytest.raises(LayoutError, match=r"model\.safetensors is damaged"):
        read_directory(saved)


def test_a_header_that_is_not_one_is_refused(saved: Path) -> None:
    content = bytearray((saved / WEIGHTS).read_bytes())
    content[8:20] = b"\xff" * 12
    (saved / WEIGHTS).write_bytes(content)
    with pytest.raises(LayoutError, match="is damaged"):
        read_directory(saved)
    (saved / WEIGHTS).write_bytes((1 << 60).to_bytes(8, "little") + bytes(content[8:]))
    with pytest.raises(LayoutError, match="is damaged"):
        read_directory(saved)


def test_unsafe_formats_are_named_and_not_read(saved: Path) -> None:
    (saved / WEIGHTS).rename(saved / "pytorch_model.bin")
    with pytest.raises(LayoutError, match=r"holds no weights.*pytorch_model\.bin may run code"):
        read_directory(saved)
    (saved / "pytorch_model.bin").unlink()
    with pytest.raises(LayoutError, match=r"holds no weights: neither model\.safetensors nor"):
        read_directory(saved)


def test_missing_things_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"nowhere does not exist"):
        read_directory(tmp_path / "nowhere")
    with pytest.raises(LayoutError, match=r"config\.json is not a directory"):
        read_directory(saved / "config.json")
    (saved / "config.json").write_text("{")
    with pytest.raises(LayoutError, match=r"config\.json is not valid JSON"):
        read_directory(saved)
    (saved / "config.json").write_text("[]")
    with pytest.raises(LayoutError, match=r"config\.json holds a JSON list"):
        read_directory(saved)
    (saved / "config.json").unlink()
    with pytest.raises(LayoutError, match=r"config\.json does not exist"):
        read_directory(saved)


def leftovers(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir() if path.name.startswith("."))


def test_a_draft_may_be_written_over_a_draft(saved: Path) -> None:
    other = tiny_draft(TARGET, seed=9)
    other.save(saved, extra_files={"README.md": "words", "notes.txt": b"\x00"})
    assert torch.equal(read_directory(saved).tensors["fc.weight"], other.backbone.fc.weight)
    assert (saved / "README.md").read_text() == "words"
    assert (saved / "notes.txt").read_bytes() == b"\x00"
    other.save(saved, extra_files={"README.md": "other", "notes.txt": ""})
    assert (saved / "README.md").read_text() == "other"
    assert leftovers(saved.parent) == []


def test_directories_with_other_things_are_left_alone(saved: Path, tmp_path: Path) -> None:
    (saved / "thesis.tex").write_text("years of work")
    with pytest.raises(LayoutError, match=r"holds thesis\.tex"):
        tiny_draft(TARGET, seed=9).save(saved)
    assert (saved / "thesis.tex").read_text() == "years of work"
    other = tmp_path / "other"
    other.mkdir()
    (other / WEIGHTS).write_text("no config beside it")
    with pytest.raises(LayoutError, match="is not only a draft directory"):
        tiny_draft(TARGET).save(other)
    (tmp_path / "file").write_text("")
    with pytest.raises(LayoutError, match="is a file"):
        tiny_draft(TARGET).save(tmp_path / "file")
    assert leftovers(tmp_path) == []


def test_an_empty_directory_and_missing_parents_are_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    tiny_draft(TARGET).save(tmp_path / "empty")
    tiny_draft(TARGET).save(tmp_path / "a/b/c")
    assert read_directory(tmp_path / "empty").config == read_directory(tmp_path / "a/b/c").config


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LayoutError, match=r"cannot write into .*file"):
        tiny_draft(TARGET).save(tmp_path / "file" / "draft")


def test_the_old_draft_stays_when_the_disk_is_full(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails instead of the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(LayoutError, match=r"cannot be written to .* as it was before; make room") as raised:
            tiny_draft(TARGET, seed=9).save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(saved) in str(raised.value)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert leftovers(saved.parent) == []


def test_the_old_draft_comes_back_when_the_last_step_fails(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    replace, calls = os.replace, []

    def fail_second(source: Path, destination: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise PermissionError(13, "Permission denied")
        replace(source, destination)

    monkeypatch.setattr(files.os, "replace", fail_second)
    with pytest.raises(PermissionError):
        tiny_draft(TARGET, seed=9).save(saved)
    assert len(calls) == 3
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize("name", ["../escape", "a/b", "config.json", WEIGHTS, "/tmp/x"])
def test_extra_files_have_plain_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(LayoutError, match="a plain file name"):
        tiny_draft(TARGET).save(tmp_path / "draft", extra_files={name: "x"})
    assert not (tmp_path / "draft").exists()
