"""Stages are skipped, continued, refused or redone by their settings."""

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.run.stamps import Stamps


class Work:
    """Appends to its output each time it runs, so that continuing and starting over differ."""

    def __init__(self, output):
        self.output = output

    def __call__(self):
        self.output.mkdir(exist_ok=True)
        file = self.output / "lines"
        file.write_text((file.read_text() if file.exists() else "") + "x")

    @property
    def runs_kept(self):
        return len((self.output / "lines").read_text())


def test_the_same_settings_run_once(tmp_path):
    work = Work(tmp_path / "out")
    stamps = Stamps(tmp_path, redo=False)
    assert stamps.perform("capture", {"a": {"b": 1}}, [work.output], work)
    assert not Stamps(tmp_path, redo=False).perform("capture", {"a": {"b": 1}}, [work.output], work)
    assert work.runs_kept == 1


def test_a_missing_output_runs_again(tmp_path):
    work = Work(tmp_path / "out")
    stamps = Stamps(tmp_path, redo=False)
    stamps.perform("capture", {}, [work.output], work)
    (work.output / "lines").unlink()
    work.output.rmdir()
    assert stamps.perform("capture", {}, [work.output], work)


def test_changed_settings_are_named(tmp_path):
    work = Work(tmp_path / "out")
    Stamps(tmp_path, redo=False).perform("capture", {"a": {"b": 1}, "c": "same"}, [work.output], work)
    with pytest.raises(DraftsmithError, match=r"a\.b: 1 then, 2 now") as error:
        Stamps(tmp_path, redo=False).perform("capture", {"a": {"b": 2}, "c": "same"}, [work.output], work)
    assert "c:" not in str(error.value)
    assert work.runs_kept == 1


def test_what_no_longer_counts_as_a_setting_is_not_compared(tmp_path):
    """A stamp may hold more than is compared now: fields that counted when it was written."""
    work = Work(tmp_path / "out")
    written = {"train": {"lr": 1, "graphs": True}, "features": "sum"}
    Stamps(tmp_path, redo=False).perform("train", written, [work.output], work)
    without = {"train": {"train": {"graphs"}, "features": {"graphs"}}, "bench": {"train": {"lr"}}}
    stamps = Stamps(tmp_path, redo=True, without_effect=without)
    assert not stamps.perform("train", {"train": {"lr": 1}, "features": "sum"}, [work.output], work)
    assert stamps.perform("train", {"train": {"lr": 2}, "features": "sum"}, [work.output], work)


def test_changed_settings_start_over_where_that_is_wanted(tmp_path):
    work = Work(tmp_path / "out")
    Stamps(tmp_path, redo=True).perform("capture", {"a": 1}, [work.output], work)
    assert Stamps(tmp_path, redo=True).perform("capture", {"a": 2}, [work.output], work)
    assert work.runs_kept == 1  # the first output was removed


def test_an_interrupted_stage_is_continued(tmp_path):
    work = Work(tmp_path / "out")

    def interrupted():
        work()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stamps(tmp_path, redo=True).perform("capture", {"a": 1}, [work.output], interrupted)
    assert Stamps(tmp_path, redo=True).perform("capture", {"a": 1}, [work.output], work)
    assert work.runs_kept == 2  # what the interrupted run left was kept


def test_a_damaged_stamp_is_an_error(tmp_path):
    work = Work(tmp_path / "out")
    Stamps(tmp_path, redo=True).perform("capture", {}, [work.output], work)
    (tmp_path / "stages" / "capture.json").write_text("{")
    with pytest.raises(DraftsmithError, match="damaged"):
        Stamps(tmp_path, redo=True).perform("capture", {}, [work.output], work)


def test_a_run_directory_that_cannot_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    work = Work(tmp_path / "out")
    with pytest.raises(DraftsmithError, match=r"run directory .*file cannot be written .*run=DIR"):
        Stamps(tmp_path / "file", redo=False).perform("capture", {}, [work.output], work)
    assert not work.output.exists()


def test_work_that_is_not_done_leaves_its_stage_open(tmp_path):
    work = Work(tmp_path / "out")

    def some_of_it():
        work()
        return False

    stamps = Stamps(tmp_path, redo=False)
    assert stamps.perform("capture", {"a": 1}, [work.output], some_of_it)
    assert stamps.finished("capture") is None
    assert stamps.perform("capture", {"a": 1}, [work.output], work)
    assert work.runs_kept == 2
    assert stamps.finished("capture") == {"a": 1}
