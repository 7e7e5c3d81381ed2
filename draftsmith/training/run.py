"""`train`: a whole run, and its resumption."""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from draftsmith.algorithms.section import DraftSection
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance
from draftsmith.parallel.processes import raise_together
from draftsmith.training.checkpoint import RunCheckpoints
from draftsmith.training.hooks import Hooks
from draftsmith.training.loop import Loop
from draftsmith.training.options import TrackOptions, TrainOptions
from draftsmith.training.prepare import Training, TrainingTarget, prepare
from draftsmith.training.record import CHECKPOINTS, RunRecord, claim, write_record
from draftsmith.training.report import write_run_report
from draftsmith.training.source import FeatureSource
from draftsmith.training.sums import Averages
from draftsmith.training.tracking import RunLog, new_tracker_ids

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What a call of `train` came to: `step` of `total_steps` done; `interrupted_by`, the signal that stopped it
    early, or None; `evaluation`, the held-out averages at the last step (None where there were none); `best_step`,
    the step of the best evaluated checkpoint."""

    run_dir: Path
    step: int
    total_steps: int
    interrupted_by: str | None
    evaluation: Averages | None
    best_step: int | None


def train(
    section: DraftSection,
    target: TrainingTarget,
    source: FeatureSource,
    run_dir: Path | str,
    options: TrainOptions,
    track: TrackOptions | None = None,
    *,
    provenance: Provenance | None = None,
    resume: bool = False,
    hooks: Hooks | None = None,
) -> TrainResult:
    """Train the draft that `section` describes on the features of `source`; every result goes to `run_dir`.

    target: what a draft's configuration needs to know of it, and its embedding and output head (copied to the training
    device). source: a store (`StoreSource`), or features that are made as they are asked for. provenance: who made the
    features, by the recipe; compared with what they say themselves (None, also in its parts: not compared). resume: go
    on from the latest whole checkpoint in `run_dir` (from the beginning where there is none); the run's own draft
    configuration then holds, and `init_from` is not read.

    SIGTERM and SIGINT finish the running step, save, and return with `interrupted_by` set. Raises `DraftsmithError` for
    settings that cannot be trained, a store that does not fit, a directory that holds a run already, a checkpoint that
    cannot be written; `NonFiniteError` when a loss or gradient is not finite.
    """
    run_dir, track, hooks = Path(run_dir), track or TrackOptions(), hooks or Hooks()
    training = prepare(section, target, source, run_dir, options, track, provenance=provenance, resume=resume)
    with open_run(training, track) as run:
        loop = Loop(training, run.checkpoints, run.log, hooks)
        if training.start.latest is not None:
            loop.restore(training.start.latest)
        position = loop.state.position
        with hooks.progress.stage("train", total=training.total_steps, unit="steps") as stage:
            stage.advance(position.step)
            interrupted_by = loop.run(stage)
    best, position = run.checkpoints.best(), loop.state.position
    result = TrainResult(
        run_dir=run_dir,
        step=position.step,
        total_steps=training.total_steps,
        interrupted_by=interrupted_by,
        evaluation=position.evaluation,
        best_step=best.position.step if best else None,
    )
    if track.jsonl and training.accelerator.is_main_process:
        report(result, run.record, training.source.place, skipped=loop.state.skipped)
    return result


@dataclass(frozen=True)
class OpenRun:
    """A run directory while its run goes on."""

    record: RunRecord
    checkpoints: RunCheckpoints
    log: RunLog


@contextmanager
def open_run(training: Training, track: TrackOptions) -> Iterator[OpenRun]:
    """While open, the run directory is this run's alone, its record says what the run is, and its log takes numbers.

    Raises `DraftsmithError`, in all processes, while another run has the directory, or where it cannot be written.
    """
    start, accelerator = training.start, training.accelerator
    record = _record(training, track)
    accelerator.wait_for_everyone()  # every process has looked at what was there before it changes
    failure, claimed = None, None
    if accelerator.is_main_process:
        try:
            claimed = claim(start.run_dir)
            write_record(start.run_dir, record)
        except DraftsmithError as error:
            failure = error
    raise_together(failure)
    with closing(claimed) if claimed is not None else nullcontext():
        log = RunLog(
            start.run_dir,
            track,
            accelerator,
            config={"draft": start.section.model_dump(mode="json"), "train": record.options},
            tracker_ids=record.tracker_ids,
            resumed_at=start.latest.position.step if start.latest else None,
        )
        yield OpenRun(record, RunCheckpoints(start.run_dir / CHECKPOINTS), log)
        log.close()


def _record(training: Training, track: TrackOptions) -> RunRecord:
    """The record of the run: a new one, or that of the run that goes on, with the options of now."""
    start, source, options = training.start, training.source, training.options.model_dump(mode="json")
    if start.record is not None:
        return start.record.model_copy(update={"options": options})
    return RunRecord(
        draft_section=start.section.model_dump(mode="json"),
        draft_config=start.config.to_dict(),
        options=options,
        store=source.fingerprint,
        store_directory=source.place,
        target=source.header.target.model_dump(mode="json"),
        tracker_ids=new_tracker_ids(track),
    )


def report(result: TrainResult, record: RunRecord, place: str, *, skipped: int) -> None:
    """Write the run's page: the training is saved, so a failure is a warning. place: where the features came from;
    skipped: steps that were left out."""
    ended = "finished" if result.interrupted_by is None else f"stopped by {result.interrupted_by}"
    outcome = [
        ("steps", f"{result.step:,} of {result.total_steps:,} ({ended})"),
        ("features", place),
        *([("best checkpoint", f"step {result.best_step:,}")] if result.best_step is not None else []),
        *([("steps left out", f"{skipped:,}")] if skipped else []),
    ]
    try:
        _log.info("report: %s", write_run_report(result.run_dir, record, outcome))
    except OSError as error:
        _log.warning("the training is saved, and its report could not be written: %s", error)
