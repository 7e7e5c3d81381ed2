"""Writers: what they refuse, and what they leave behind when they end early."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.base.files import WriteError
from draftsmith.errors import DraftsmithError
from draftsmith.features import shards
from draftsmith.features.manifest import StoreError
from draftsmith.features.reader import Store
from draftsmith.features.shards import StoreWriter, finish_store, finished_shards

from . import stores

LAYOUT = stores.layout()


def _ids(directory: Path) -> list[str]:
    return [sample_id for shard in finished_shards(directory) for sample_id in shard.sample_ids]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_id": ""}, "the id is empty"),
        ({"input_ids": torch.zeros(0, dtype=torch.int64)}, "S >= 1"),
        ({"input_ids": torch.zeros(5, dtype=torch.int32)}, "input_ids are torch.int32"),
        ({"loss_mask": torch.zeros(4, dtype=torch.bool)}, "loss_mask"),
        ({"loss_mask": torch.zeros(5, dtype=torch.uint8)}, "loss_mask"),
        ({"features": {"taps": torch.zeros(5, 6, dtype=torch.bfloat16)}}, "the layout wants"),
        (
            {
                "features": {
                    "taps": torch.zeros(5, 7, dtype=torch.bfloat16),
                    "final_state": torch.zeros(5, 3, dtype=torch.bfloat16),
                }
            },
            r"taps is torch.bfloat16 \[5, 7\]; it must be torch.bfloat16 \[5, 6\]",
        ),
        (
            {"features": {"taps": torch.zeros(5, 6), "final_state": torch.zeros(5, 3)}},
            "taps is torch.float32",
        ),
    ],
)
def test_records_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    (good,) = stores.records([5], LAYOUT)
    with StoreWriter(tmp_path, stores.header(LAYOUT)) as writer:
        with pytest.raises(DraftsmithError, match=message):
            writer.add(replace(good, **changes))
        writer.add(good)
    assert finish_store(tmp_path).samples == 1


def test_the_same_id_twice_is_refused(tmp_path: Path) -> None:
    first, second = stores.records([5, 6], LAYOUT)
    with StoreWriter(tmp_path, stores.header(LAYOUT)) as writer:
        writer.add(first)
        with pytest.raises(DraftsmithError, match="given twice"):
            writer.add(replace(second, sample_id=first.sample_id))
        writer.flush()
        writer.add(first)  # now in another shard: found when the store is finished
    with pytest.raises(StoreError, match=r"is in both shard-0000-000000.* and shard-0000-000001"):
        finish_store(tmp_path)


def test_a_store_of_something_else_is_not_appended_to(tmp_path: Path) -> None:
    """Trap 21: every differing field is named."""
    stores.write_store(tmp_path, stores.records([5], LAYOUT), LAYOUT)
    other = replace(LAYOUT, tap_ids=(1, 4), final_state=False)
    with pytest.raises(StoreError) as error:
        StoreWriter(tmp_path, stores.header(other))
    assert "tap_ids: the store has (4, 1), this run needs (1, 4)" in str(error.value)
    assert "final_state: the store has 'post_norm', this run needs None" in str(error.value)
    tokenizer = stores.TOKENIZER.model_copy(update={"template_hash": None})
    header = stores.header(LAYOUT).model_copy(update={"tokenizer": tokenizer})
    with pytest.raises(StoreError, match=r"tokenizer\.template_hash"):
        StoreWriter(tmp_path, header)


def test_one_writer_number_is_held_by_one_process(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, stores.header(LAYOUT)):
        with pytest.raises(StoreError, match="another process is writing"):
            StoreWriter(tmp_path, stores.header(LAYOUT))
        with StoreWriter(tmp_path, stores.header(LAYOUT), number=1):
            pass
    with StoreWriter(tmp_path, stores.header(LAYOUT)):
        pass


def test_two_writers_make_one_store_and_one_may_have_nothing_to_do(tmp_path: Path) -> None:
    written = stores.records([5, 6, 7, 2], LAYOUT)
    writers = [StoreWriter(tmp_path, stores.header(LAYOUT), shard_bytes=150, number=number) for number in range(3)]
    for position, item in enumerate(written):
        writers[position % 2].add(item)
    for writer in writers:
        with writer:
            pass
    finish_store(tmp_path)
    read = {item.sample_id: item for item in Store.open(tmp_path)}
    assert len(read) == 4
    assert all(stores.equal(item, read[item.sample_id]) for item in written)


def test_traces_of_a_killed_writer_count_for_nothing(tmp_path: Path) -> None:
    """Trap 19: a shard counts once its tokens file is there; half files and orphans are cleared away."""
    written = stores.records([5, 6, 7], LAYOUT)
    with StoreWriter(tmp_path, stores.header(LAYOUT), shard_bytes=1) as writer:
        for item in written[:2]:
            writer.add(item)
    last = sorted(tmp_path.glob("*.tokens.safetensors"))[-1]
    half = tmp_path / "shard-0000-000002.features.safetensors.123.partial"
    half.write_bytes(b"half")
    last.unlink()
    with pytest.raises(StoreError, match=r"has no manifest\.json"):
        Store.open(tmp_path)
    assert _ids(tmp_path) == [written[0].sample_id]
    with StoreWriter(tmp_path, stores.header(LAYOUT), shard_bytes=1) as writer:
        assert not half.exists()
        assert len(list(tmp_path.glob("*.features.safetensors"))) == 1
        for item in written[1:]:
            writer.add(item)
    finish_store(tmp_path)
    assert all(stores.equal(a, b) for a, b in zip(written, Store.open(tmp_path), strict=True))


def test_a_damaged_finished_shard_stops_a_resume(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, stores.header(LAYOUT)) as writer:
        writer.add(stores.records([5], LAYOUT)[0])
    (features,) = tmp_path.glob("*.features.safetensors")
    features.write_bytes(features.read_bytes()[:-1])
    with pytest.raises(StoreError, match=f"{features.name} has .* bytes and should have"):
        finished_shards(tmp_path)


def test_shards_without_a_header_belong_to_nobody(tmp_path: Path) -> None:
    stores.write_store(tmp_path, stores.records([5], LAYOUT), LAYOUT)
    (tmp_path / "header.json").unlink()
    with pytest.raises(StoreError, match=r"without a header\.json"):
        StoreWriter(tmp_path, stores.header(LAYOUT))


def test_an_exception_keeps_what_was_added(tmp_path: Path) -> None:
    first, second = stores.records([5, 6], LAYOUT)

    def interrupted() -> None:
        with StoreWriter(tmp_path, stores.header(LAYOUT)) as writer:
            writer.add(first)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert _ids(tmp_path) == [first.sample_id]
    with StoreWriter(tmp_path, stores.header(LAYOUT)) as writer:
        writer.add(second)
    assert finish_store(tmp_path).samples == 2


def test_a_full_disk_says_so_and_loses_nothing_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 23."""
    first, second = stores.records([5, 6], LAYOUT)
    with StoreWriter(tmp_path, stores.header(LAYOUT), shard_bytes=1) as writer:
        writer.add(first)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        writer = StoreWriter(tmp_path, stores.header(LAYOUT), shard_bytes=1)
        writer.add(second)
        with pytest.raises(WriteError, match="No space left on device"):
            writer.flush()
    with writer:  # there is room again: leaving writes what was added
        pass
    finish_store(tmp_path)
    assert all(stores.equal(a, b) for a, b in zip([first, second], Store.open(tmp_path), strict=True))


def test_a_finished_store_stays_readable_while_it_grows(tmp_path: Path) -> None:
    first, second, third = stores.records([5, 6, 7], LAYOUT)
    stores.write_store(tmp_path, [first], LAYOUT)
    with StoreWriter(tmp_path, stores.header(LAYOUT)) as writer:
        writer.add(second)
        writer.flush()
        assert stores.equal(Store.open(tmp_path)[0], first)
        assert len(Store.open(tmp_path)) == 1
        writer.add(third)
    assert finish_store(tmp_path).samples == 3
    assert len(list(tmp_path.glob("index-*"))) == 1
    assert all(stores.equal(a, b) for a, b in zip([first, second, third], Store.open(tmp_path), strict=True))


def test_an_empty_store_is_an_error(tmp_path: Path) -> None:
    """Trap 18."""
    with StoreWriter(tmp_path, stores.header(LAYOUT)):
        pass
    with pytest.raises(StoreError, match="not one record"):
        finish_store(tmp_path)
    with pytest.raises(StoreError, match="no capture to finish"):
        finish_store(tmp_path / "nowhere")


def test_other_dtypes_and_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"capture\.dtype is torch.float16"):
        stores.header(replace(LAYOUT, dtype=torch.float16))
    with pytest.raises(DraftsmithError, match="shard_bytes is 0"):
        StoreWriter(tmp_path, stores.header(LAYOUT), shard_bytes=0)


def test_checksum_depends_on_every_byte() -> None:
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    changed = rows.clone()
    changed[6, 4] = -changed[6, 4]
    assert shards.checksum(rows) == shards.checksum(rows.clone())
    assert shards.checksum(rows) != shards.checksum(changed)
