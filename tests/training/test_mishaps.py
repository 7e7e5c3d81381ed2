"""What a run meets that is no fault of its draft: disks, damaged files, another machine, options that go nowhere."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from pydantic import ValidationError

from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance
from draftsmith.training.checkpoint import STATE, WEIGHTS, Position, RunCheckpoints
from draftsmith.training.guards import NonFiniteReport, write_report
from draftsmith.training.record import claim, find_checkpoint, read_record
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from draftsmith.training.tracking import RunLog
from tests.training.counting import QUIET, identity_of, options, section

SHORT = {"max_steps": 3, "save_every": 1, "keep_last": 3, "eval_share": 0.0}


def run(target, store, run_dir, *, resume=False, **changes):
    return train(
        section=section(),
        target=target,
        source=StoreSource(store),
        run_dir=run_dir,
        options=options(**{**SHORT, **changes}),
        track=QUIET,
        provenance=Provenance(identity_of(target), None),
        resume=resume,
    )


# --- options --------------------------------------------------------------------------------------------------------


def test_evaluations_without_held_out_documents_are_refused():
    with pytest.raises(ValidationError, match="eval_every is 5 and eval_prompts is 3 with eval_share 0"):
        options(eval_share=0, eval_every=5, eval_prompts=3)
    options(eval_share=0.1, eval_every=5, eval_prompts=3)
    options(eval_share=0)


@pytest.mark.parametrize("fields", [{"max_steps": 10**12}, {"seed": 2**64}, {"seed": -1}, {"epochs": 2**31}])
def test_numbers_that_nothing_can_hold_are_refused(fields):
    (name,) = fields
    with pytest.raises(ValidationError, match=name):
        options(**fields)


def test_the_largest_seed_trains(target, store, run_dir):
    assert run(target, store, run_dir, seed=2**63 - 1, max_steps=1).step == 1


# --- resuming -------------------------------------------------------------------------------------------------------


def test_a_run_of_a_gpu_goes_on_where_there_is_none(target, store, run_dir):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    run(target, store, run_dir)
    last = find_checkpoint(run_dir, "last")
    state = last.state()
    state["generators"][0]["cuda"] = torch.zeros(16, dtype=torch.uint8)  # as torch.cuda.get_rng_state gives it
    RunCheckpoints(run_dir / "checkpoints").save(last.position, last.weights(), state)
    assert run(target, store, run_dir, resume=True, max_steps=4).step == 4


def test_options_that_a_resumed_run_changes_are_said_and_recorded(target, store, run_dir, caplog):
    run(target, store, run_dir)
    with caplog.at_level(logging.INFO, logger="draftsmith"):
        run(target, store, run_dir, resume=True, max_steps=4, lr=1e-4)
    assert "train.lr was 0.003, is 0.0001 from here on" in caplog.text
    assert "train.max_steps was 3, is 4 from here on" in caplog.text
    assert "train.seed" not in caplog.text
    assert read_record(run_dir).options["lr"] == 1e-4


def test_entries_that_cannot_be_read_are_dropped_with_a_warning(target, store, run_dir, caplog):
    run(target, store, run_dir)
    metrics = run_dir / "metrics.jsonl"
    whole = metrics.read_text().splitlines()
    metrics.write_bytes(b"\n".join([whole[0].encode(), b"\xff\x00{", b"[3]", *map(str.encode, whole[1:]), b"{torn"]))
    run(target, store, run_dir, resume=True, max_steps=4)
    found = metrics.read_text().splitlines()
    assert found[: len(whole)] == whole
    assert json.loads(found[-1])["step"] == 4
    assert "dropped 2 lines that cannot be read" in caplog.text


def test_a_damaged_record_is_named(target, store, run_dir):
    run(target, store, run_dir)
    (run_dir / "run.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DraftsmithError, match=r"run\.json cannot be read"):
        run(target, store, run_dir, resume=True)


@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_a_checkpoint_that_rotted_is_named_and_the_one_before_goes_on(target, store, run_dir, name):
    """Its size is right, so that it counts as whole."""
    run(target, store, run_dir)
    path = find_checkpoint(run_dir, "last").directory / name
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DraftsmithError, match=rf"step-00000003/{name} .* cannot be read .*; remove .*step-00000003 to"):
        run(target, store, run_dir, resume=True)
    shutil.rmtree(path.parent)
    assert run(target, store, run_dir, resume=True).step == 3


# --- others ---------------------------------------------------------------------------------------------------------


def test_one_process_trains_in_a_directory_at_a_time(target, store, run_dir):
    run(target, store, run_dir)  # leaves the directory free
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _held = claim(run_dir)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        before = (run_dir / "metrics.jsonl").read_text()
        with pytest.raises(DraftsmithError, match=rf"another process trains in {run_dir} \(process {child} on "):
            run(target, store, run_dir, resume=True, max_steps=4)
        assert (run_dir / "metrics.jsonl").read_text() == before
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
    assert run(target, store, run_dir, resume=True, max_steps=4).step == 4


# --- disks ----------------------------------------------------------------------------------------------------------


def test_a_disk_without_room_for_the_numbers_of_a_step(tmp_path):
    log = RunLog(tmp_path, QUIET, Accelerator(cpu=True), config={}, tracker_ids={}, resumed_at=None)
    log.log("train", 1, {"loss": 2.0})
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(DraftsmithError, match=r"numbers of step 2 .*metrics\.jsonl .*No space left.*--resume"):
        log.log("train", 2, {"loss": 1.0})


def test_a_run_directory_that_cannot_be_made_is_named(target, store, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftsmithError, match=r"file/run cannot be made"):
        run(target, store, tmp_path / "file" / "run")


def test_a_report_that_cannot_be_written_does_not_lose_the_run(target, store, run_dir, caplog):
    (run_dir / "report.html").mkdir(parents=True)
    assert run(target, store, run_dir).step == 3
    assert "the training is saved, and its report could not be written" in caplog.text


def test_a_debug_record_that_cannot_be_written_says_so(tmp_path):
    report = NonFiniteReport(7, 0, 1e-3, "loss", ["doc-1"], [float("nan")])
    assert json.loads(Path(write_report(report, tmp_path / "debug")).read_text())["step"] == 7
    (tmp_path / "file").write_text("")
    assert write_report(report, tmp_path / "file").startswith("not written (")


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing(tmp_path, monkeypatch, caplog):
    checkpoints = RunCheckpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(Position(step=step, epoch=0, step_in_epoch=step), {"a": torch.ones(2)}, {"optimizer": {}})

    def refuse(path, **options):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    checkpoints.prune(keep_last=1, keep_best=0)
    assert "step-00000001 is not needed any more and cannot be removed: [Errno 16]" in caplog.text
    assert [checkpoint.position.step for checkpoint in checkpoints.all()] == [1, 2]
