"""Feature files of other projects become the records that a capture of the same target makes."""

import gzip
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.capture.foreign import FORMATS
from draftsmith.capture.hf import HfBackend
from draftsmith.capture.imports import ImportOptions, import_features
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.refusals import Reason
from draftsmith.capture.report import CaptureReport
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.reader import Store
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.verify import verify_store
from tests.support.tiny import tiny_target

from .samples import provenance, random_samples

LENGTHS = (5, 9, 14, 3, 8, 21)
HELD = (2, 0, 1)
"""The layers that the foreign files hold."""
LAYOUT = CaptureLayout((0, 2), 32, final_state=True, dtype=torch.float32)
TARGET = tiny_target()


def states(sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """Of the layers in HELD [S, 3H], and the final state [S, H] before and after the norm."""
    everything = CaptureLayout((*HELD, TARGET.num_layers - 1), 32, final_state=True)
    (features,) = HfBackend(TARGET, everything).features([sample])
    return features["taps"][:, :96].clone(), features["taps"][:, 96:].clone(), features["final_state"].clone()


def write_specforge(directory: Path, number: int, sample: Sample) -> Path:
    taps, _, final = states(sample)
    data = {
        "input_ids": sample.input_ids,
        "loss_mask": sample.loss_mask.long(),
        "hidden_states": taps[None],
        "target_last_hidden_states": final[None],
    }
    return save(directory / f"rows_{number - number % 4}-{number - number % 4 + 4}" / f"data_{number}.ckpt", data)


def write_eagle3(directory: Path, number: int, sample: Sample) -> Path:
    taps, _, final = states(sample)
    data = {
        "input_ids": sample.input_ids[None],
        "loss_mask": sample.loss_mask.long()[None],
        "aux_hidden_state": taps[None],
        "hidden_state": final[None],
    }
    return save(directory / f"data_{number}.ckpt.gz", data)


def write_modelopt(directory: Path, number: int, sample: Sample) -> Path:
    taps, pre_norm, _ = states(sample)
    data = {
        "input_ids": sample.input_ids,
        "hidden_states": pre_norm,
        "aux_hidden_states": taps,
        "loss_mask": sample.loss_mask.long(),
        "conversation_id": sample.id,
        "hidden_states_prenorm": True,
    }
    return save(directory / f"{sample.id}.pt", data)


def write_speculators(directory: Path, number: int, sample: Sample) -> Path:
    taps, pre_norm, _ = states(sample)
    path = directory / f"hs_{number}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    by_layer = torch.cat([taps.unflatten(-1, (3, 32)), pre_norm[:, None]], dim=1)
    save_file({"hidden_states": by_layer, "token_ids": sample.input_ids}, path)
    return path


def save(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(data, buffer)
    path.write_bytes(gzip.compress(buffer.getvalue()) if path.suffix == ".gz" else buffer.getvalue())
    return path


WRITERS: dict[str, tuple[Callable[[Path, int, Sample], Path], str, str]] = {
    "specforge": (write_specforge, "specforge", "post_norm"),
    "specforge for EAGLE-3": (write_eagle3, "specforge", "post_norm"),
    "modelopt": (write_modelopt, "modelopt", "pre_norm"),
    "speculators": (write_speculators, "speculators", "pre_norm"),
}


def run(
    files: Path, source: str, final_state: str, store: Path, tap_ids: tuple[int, ...] = HELD, **changes: Any
) -> CaptureReport:
    checked = changes.pop("check_samples", 0)
    arguments: dict[str, Any] = {
        "layout": LAYOUT,
        "directory": store,
        "options": CaptureOptions(dtype="float32", shard_bytes=3000),
        "provenance": provenance(TARGET),
        "max_length": 512,
        "samples": random_samples(LENGTHS),
        "norm": TARGET.model.get_decoder().norm,
        **changes,
    }
    with torch.no_grad():
        return import_features(ImportOptions(files, source, tap_ids, final_state, checked), **arguments)


@pytest.mark.parametrize("kind", WRITERS)
def test_imported_records_are_the_targets_own(kind: str, tmp_path: Path) -> None:
    write, source, final_state = WRITERS[kind]
    samples = random_samples(LENGTHS)
    for number, sample in enumerate(samples):
        write(tmp_path / "files", number, sample)
    report = run(
        tmp_path / "files", source, final_state, tmp_path / "store", check=HfBackend(TARGET, LAYOUT), check_samples=2
    )
    assert (report.captured, report.resumed, report.refused) == (len(samples), 0, {})
    store = Store.open(tmp_path / "store")
    assert verify_store(tmp_path / "store") == []
    by_tokens = {tuple(record.input_ids.tolist()): record for record in store}
    for sample in samples:
        record = by_tokens[tuple(sample.input_ids.tolist())]
        (wanted,) = HfBackend(TARGET, LAYOUT).features([sample])
        assert torch.equal(record.loss_mask, sample.loss_mask)
        for name in LAYOUT.widths:
            torch.testing.assert_close(record.features[name], wanted[name], rtol=1e-5, atol=1e-5)
    # Doing it again adds nothing.
    again = run(tmp_path / "files", source, final_state, tmp_path / "store")
    assert (again.captured, again.resumed) == (0, len(samples))


def test_layers_and_norms_that_are_not_what_was_said_are_found(tmp_path: Path) -> None:
    """Traps 14 and 20."""
    (sample,) = random_samples([9])
    write_specforge(tmp_path / "post", 0, sample)
    check = {"check": HfBackend(TARGET, LAYOUT), "check_samples": 1}
    with pytest.raises(DraftsmithError, match=r"data_0\.ckpt: layer 0 differs from what the target computes"):
        run(tmp_path / "post", "specforge", "post_norm", tmp_path / "a", (3, 2, 0), **check)
    taps, pre_norm, final = states(sample)
    path = write_specforge(tmp_path / "pre", 0, sample)
    save(path, {**torch.load(path, weights_only=True), "target_last_hidden_states": pre_norm[None]})
    with pytest.raises(DraftsmithError, match="the final state differs"):
        run(tmp_path / "pre", "specforge", "post_norm", tmp_path / "b", **check)
    other = replace(sample, input_ids=sample.input_ids.roll(1))
    save(
        tmp_path / "other" / "data_0.ckpt",
        {
            "input_ids": other.input_ids,
            "loss_mask": other.loss_mask.long(),
            "hidden_states": taps[None],
            "target_last_hidden_states": final[None],
        },
    )
    with pytest.raises(DraftsmithError, match="differs from what the target computes"):
        run(tmp_path / "other", "specforge", "post_norm", tmp_path / "c", **check)
    with pytest.raises(DraftsmithError, match="1 documents are to be compared, and `check` is None"):
        run(tmp_path / "post", "specforge", "post_norm", tmp_path / "c", check_samples=1)
    assert not any((tmp_path / name).exists() for name in "abc")


def test_what_the_files_say_of_their_norm_is_believed_over_nothing(tmp_path: Path) -> None:
    (sample,) = random_samples([9])
    write_modelopt(tmp_path / "m", 0, sample)
    write_speculators(tmp_path / "s", 0, sample)
    for files, source in (("m", "modelopt"), ("s", "speculators")):
        with pytest.raises(DraftsmithError, match="before the final norm, and --final-state is 'post_norm'"):
            run(tmp_path / files, source, "post_norm", tmp_path / "store")


def test_what_the_draft_needs_must_be_there(tmp_path: Path) -> None:
    (sample,) = random_samples([9])
    path = write_specforge(tmp_path / "files", 0, sample)
    with pytest.raises(DraftsmithError, match=r"layers \[0, 2\] and the files hold \[1, 2, 3\].*\[0\] are missing"):
        run(tmp_path / "files", "specforge", "post_norm", tmp_path / "store", (1, 2, 3))
    with pytest.raises(DraftsmithError, match="needs the target's final state and --final-state is 'none'"):
        run(tmp_path / "files", "specforge", "none", tmp_path / "store")
    with pytest.raises(DraftsmithError, match=r"holds features \[9, 96\]; 9 tokens of 2 layers .* are \[9, 64\]"):
        run(tmp_path / "files", "specforge", "post_norm", tmp_path / "store", (0, 2))
    data = torch.load(path, weights_only=True)
    save(path, {name: value for name, value in data.items() if name != "target_last_hidden_states"})
    with pytest.raises(DraftsmithError, match="the final state is None"):
        run(tmp_path / "files", "specforge", "post_norm", tmp_path / "store")
    taps_only = replace(LAYOUT, final_state=False)
    assert run(tmp_path / "files", "specforge", "none", tmp_path / "store", layout=taps_only).captured == 1


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("hostile-was-here"),))


@pytest.mark.parametrize("damage", ["hostile", "truncated", "no zip", "no dictionary", "other fields", "mask"])
def test_files_that_cannot_be_read_are_named(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (sample,) = random_samples([9])
    path = write_eagle3(tmp_path / "files", 0, sample)
    with gzip.open(path) as file:
        data = torch.load(file, weights_only=True)
    if damage == "hostile":
        save(path, {**data, "x": Hostile()})
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "no zip":
        path.write_bytes(b"these are not the bytes of a gzip file")
    elif damage == "no dictionary":
        save(path, [1, 2])
    elif damage == "other fields":
        save(path, {"tokens": data["input_ids"]})
    else:
        save(path, {**data, "loss_mask": data["loss_mask"] * 2})
    with pytest.raises(DraftsmithError, match=path.name):
        run(tmp_path / "files", "specforge", "post_norm", tmp_path / "store")
    assert not Path("hostile-was-here").exists()


def test_unusable_documents_are_counted(tmp_path: Path) -> None:
    samples = random_samples([5, 6, 7, 8, 9])
    samples[1] = replace(samples[1], loss_mask=torch.zeros(6, dtype=torch.bool))
    for number, sample in enumerate(samples):
        write_specforge(tmp_path / "files", number, sample)
    path = tmp_path / "files" / "rows_0-4" / "data_2.ckpt"
    data = torch.load(path, weights_only=True)
    data["hidden_states"][0, 3, 64:] = float("nan")  # layer 1, which the draft does not need
    data["target_last_hidden_states"][0, 1, 5] = float("inf")
    save(path, data)
    with pytest.raises(DraftsmithError, match="1 of 5 samples cannot be captured: 1 with no supervised token"):
        run(tmp_path / "files", "specforge", "post_norm", tmp_path / "store")
    report = run(
        tmp_path / "files",
        "specforge",
        "post_norm",
        tmp_path / "store",
        options=CaptureOptions(dtype="float32", max_refused_share=0.4),
    )
    assert report.refused == {Reason.UNSUPERVISED: ("data_1",), Reason.NOT_FINITE: ("data_2",)}
    assert report.captured + report.resumed == 3


def test_documents_without_masks_need_conversations(tmp_path: Path) -> None:
    samples = random_samples([5, 6, 7])
    for number, sample in enumerate(samples):
        write_speculators(tmp_path / "files", number, sample)
    options = CaptureOptions(dtype="float32", max_refused_share=0.5)
    report = run(
        tmp_path / "files", "speculators", "pre_norm", tmp_path / "store", samples=samples[:2], options=options
    )
    assert report.refused == {Reason.WITHOUT_MASK: ("hs_2",)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((".", "other", (1,), "none"), "--from is 'other'"),
        ((".", "specforge", (1,), "normed"), "--final-state is 'normed'"),
        ((".", "specforge", (1, 1), "none"), r"--tap-ids is \[1, 1\], which repeats"),
        ((".", "specforge", (), "none"), "--tap-ids is empty"),
        ((".", "specforge", (1,), "none", -1), "--check-samples is -1"),
        (("nowhere", "specforge", (1,), "none"), "there is no directory nowhere"),
    ],
)
def test_statements_that_make_no_sense_are_refused(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        ImportOptions(Path(values[0]), *values[1:])


def test_a_directory_without_files_is_refused(tmp_path: Path) -> None:
    for name, kind in FORMATS.items():
        with pytest.raises(DraftsmithError, match="holds no files"):
            kind.files(tmp_path)
        assert name


@pytest.mark.parametrize("changed", ["the file", "the store"])
def test_documents_that_are_there_with_other_tokens_are_an_error(tmp_path: Path, changed: str) -> None:
    samples = random_samples([5, 6, 7])
    files, store = tmp_path / "files", tmp_path / "store"
    paths = [write_specforge(files, number, sample) for number, sample in enumerate(samples)]
    options = CaptureOptions(dtype="float32")
    run(files, "specforge", "post_norm", store, options=options)
    if changed == "the file":
        other = (samples[1].input_ids + 1) % 97
        save(paths[1], {**torch.load(paths[1], weights_only=True), "input_ids": other})
    else:  # an unfinished store has no checksum of its tokens yet
        (store / "manifest.json").unlink()
        (tokens,) = store.glob("*.tokens.safetensors")
        content = bytearray(tokens.read_bytes())
        place = content.index(samples[1].input_ids.to(torch.int32).numpy().tobytes())
        content[place] ^= 1
        tokens.write_bytes(content)
    with pytest.raises(DraftsmithError, match="holds sample 'data_1' with other tokens or another loss mask"):
        run(files, "specforge", "post_norm", store, options=options)
