"""`train`: everything a run needs, put together; and its resumption."""

import copy
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import ProjectConfiguration

from draftsmith.algorithms.algorithm import DraftSection
from draftsmith.algorithms.build import TargetFacts
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Computation
from draftsmith.base.devices import parse_device, resolve_device
from draftsmith.base.progress import Progress, SilentProgress
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError, differences
from draftsmith.features.check import check_store
from draftsmith.features.manifest import TargetIdentity, TokenizerIdentity
from draftsmith.features.reader import Store
from draftsmith.kernels.device import need_triton
from draftsmith.parallel.processes import raise_together
from draftsmith.parallel.ranks import process_count
from draftsmith.targets.ends import TargetEnds
from draftsmith.training.checkpoint import RunCheckpoints
from draftsmith.training.evaluation import Evaluation, split_documents
from draftsmith.training.forward import DraftLoss
from draftsmith.training.loading import TrainingBatches
from draftsmith.training.loop import EvaluateGenerate, Loop
from draftsmith.training.micro_batch import BatchMaker
from draftsmith.training.options import TrackOptions, TrainOptions, check_replayable
from draftsmith.training.plan import StepPlan, check_rows_per_step
from draftsmith.training.record import CHECKPOINTS, RunRecord, claim, write_record
from draftsmith.training.report import write_run_report
from draftsmith.training.source import FeatureSource, StoreSource
from draftsmith.training.start import find_start
from draftsmith.training.sums import Averages
from draftsmith.training.tracking import RunLog, new_tracker_ids, wanted_trackers

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
    *,
    draft_section: DraftSection,
    target: TargetFacts,
    ends: TargetEnds,
    store: Store | FeatureSource,
    run_dir: Path | str,
    options: TrainOptions,
    track: TrackOptions | None = None,
    target_identity: TargetIdentity | None = None,
    tokenizer_identity: TokenizerIdentity | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    evaluate_generate: EvaluateGenerate | None = None,
) -> TrainResult:
    """Train the draft that `draft_section` describes on the features of `store`; every result goes to `run_dir`.

    store: a feature store, or a source of features that are made as they are asked for. target: what the draft's
    configuration needs to know of the target; ends: its embedding and output head (moved to the training device).
    target_identity and tokenizer_identity are compared with the store's; None is not compared.
    resume: go on from the latest whole checkpoint in `run_dir` (from the beginning where there is none); the run's
    own draft configuration then holds, and `init_from` is not read. evaluate_generate: see `EvaluateGenerate`.

    SIGTERM and SIGINT finish the running step, save, and return with `interrupted_by` set. Raises `DraftsmithError` for
    settings that cannot be trained, a store that does not fit, a directory that holds a run already, a checkpoint that
    cannot be written; `NonFiniteError` when a loss or gradient is not finite.
    """
    check_replayable(draft_section, options)
    run_dir, track = Path(run_dir), track or TrackOptions()
    section = draft_section.model_dump(mode="json")
    start = find_start(draft_section, target, run_dir, resume=resume)
    config, latest, record, warm = start.config, start.latest, start.record, start.warm
    if resume and latest is None:
        _log.warning("%s holds no whole checkpoint to resume from; the run starts from the beginning", run_dir)
    fingerprint = store.manifest.index.sha256 if isinstance(store, Store) else store.fingerprint
    start.check(section, options.model_dump(mode="json"), fingerprint)
    for line in start.lines():
        _log.info("%s", line)
    if record is not None:
        asked = options.model_dump(mode="json")
        for name, before, now in differences(record.options, asked):
            _log.info("train.%s was %s, is %s from here on", name, before, now)
        record = record.model_copy(update={"options": asked})

    method = algorithm(draft_section.algorithm)
    layout = method.capture(config)
    header = store.manifest if isinstance(store, Store) else store.header
    check_store(header, layout, target_identity, tokenizer_identity)
    source = StoreSource(store, tuple(layout.widths)) if isinstance(store, Store) else store

    accelerator, device = _accelerator(options, track, run_dir)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    if options.graphs:
        _check_graphs(device, ranks)
    check_rows_per_step(options.rows_per_step, options.rows_per_forward, ranks)
    autocast = torch.bfloat16 if _resolved_precision(options, device) == "bf16" else None

    training, held_out = split_documents(source.sample_ids, options.eval_share)
    if not any(source.supervised[i] for i in training):
        raise DraftsmithError(
            f"{source.place}: no supervised token in {len(training)} training documents, so there is nothing "
            "to learn; look at the loss masks (`draftsmith inspect`)"
        )
    plan = StepPlan(
        [source.lengths[i] for i in training],
        [source.sample_ids[i] for i in training],
        tokens_per_row=options.tokens_per_row,
        rows_per_step=options.rows_per_step,
        rows_per_forward=options.rows_per_forward,
        seed=options.seed,
    )
    total_steps = options.max_steps or sum(plan.steps_in(epoch) for epoch in range(options.epochs))
    if latest is not None and latest.position.step > total_steps:
        raise DraftsmithError(
            f"{run_dir} has reached step {latest.position.step}, and this recipe ends at step {total_steps}; raise "
            "train.max_steps or train.epochs"
        )
    maker = method.examples(config, draft_section)
    batch_maker = BatchMaker(source, maker, options.tokens_per_row, options.num_anchors, options.seed)
    workers = options.workers(device)
    batches = TrainingBatches(plan, batch_maker, training, rank=rank, num_ranks=ranks, workers=workers, device=device)
    evaluation = None
    if held_out:
        evaluation = Evaluation(
            batch_maker,
            held_out,
            [source.lengths[i] for i in held_out],
            [source.sample_ids[i] for i in held_out],
            rows_per_forward=options.rows_per_forward,
            rank=rank,
            num_ranks=ranks,
        )

    torch.manual_seed(options.seed)
    draft = Draft.from_config(config)
    if warm is not None:
        warm.load_into(draft)
    draft = draft.to(device, torch.float32)
    how = Computation(
        device,
        autocast,
        options.attention,
        recompute=options.gradient_checkpointing,
        compile_layers=device.type == "cuda" if options.compile == "auto" else options.compile,
    )
    trainee = method.trainee(draft, _ends_for(ends, device, autocast), draft_section, how)
    draft_loss = DraftLoss(draft, trainee, autocast=autocast)

    if record is None:
        record = RunRecord(
            draft_section=section,
            draft_config=config.to_dict(),
            options=options.model_dump(mode="json"),
            store=fingerprint,
            store_directory=source.place,
            target=source.header.target.model_dump(mode="json"),
            tracker_ids=new_tracker_ids(track),
        )
    accelerator.wait_for_everyone()  # every process has looked at what was there before it changes
    failure, claimed = None, None
    if accelerator.is_main_process:
        try:
            claimed = claim(run_dir)
            write_record(run_dir, record)
        except DraftsmithError as error:
            failure = error
    raise_together(failure)
    log = RunLog(
        run_dir,
        track,
        accelerator,
        config={"draft": section, "train": options.model_dump(mode="json")},
        tracker_ids=record.tracker_ids,
        resumed_at=latest.position.step if latest else None,
    )
    checkpoints = RunCheckpoints(run_dir / CHECKPOINTS)
    loop = Loop(
        draft_loss,
        plan=plan,
        batches=batches,
        evaluation=evaluation,
        evaluate_generate=evaluate_generate,
        options=options,
        total_steps=total_steps,
        accelerator=accelerator,
        device=device,
        checkpoints=checkpoints,
        log=log,
        lag=_lag(device),
    )
    if latest is not None:
        loop.restore(latest)
    with (progress or SilentProgress()).stage("train", total=total_steps, unit="steps") as stage:
        stage.advance(loop.position.step)
        interrupted_by = loop.run(stage)
    log.close()
    if claimed is not None:
        claimed.close()
    best = checkpoints.best()
    if track.jsonl and accelerator.is_main_process:
        ended = "finished" if interrupted_by is None else f"stopped by {interrupted_by}"
        outcome = [("steps", f"{loop.position.step:,} of {total_steps:,} ({ended})"), ("features", source.place)]
        outcome += [("best checkpoint", f"step {best.position.step:,}")] if best is not None else []
        outcome += [("steps left out", f"{loop.skipped:,}")] if loop.skipped else []
        try:
            _log.info("report: %s", write_run_report(run_dir, record, outcome))
        except OSError as error:
            _log.warning("the training is saved, and its report could not be written: %s", error)
    return TrainResult(
        run_dir=run_dir,
        step=loop.position.step,
        total_steps=total_steps,
        interrupted_by=interrupted_by,
        evaluation=loop.position.evaluation,
        best_step=best.position.step if best else None,
    )


def _accelerator(options: TrainOptions, track: TrackOptions, run_dir: Path) -> tuple[Accelerator, torch.device]:
    """Accelerate's view of the processes, and the device to train on.

    Precision is not left to Accelerate: its setting is one for the whole process, which may train several runs.
    """
    named = parse_device(options.device, "train.device")
    if process_count() > 1 and named is not None and named.type == "cuda" and named.index is not None:
        raise DraftsmithError(
            f"train.device is {options.device!r} with {process_count()} processes, each of which trains on the GPU of "
            "its own number: use 'cuda' or 'auto'"
        )
    wanted = resolve_device(options.device, "train.device")
    if wanted.type == "cuda":  # the losses, at least, are kernels there
        need_triton(f"training on {wanted}", ", or set train.device to 'cpu'")
    accelerator = Accelerator(
        cpu=wanted.type == "cpu",
        mixed_precision="no",
        log_with=wanted_trackers(track) or None,
        project_config=ProjectConfiguration(project_dir=str(run_dir), logging_dir=str(run_dir / "tensorboard")),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    device = accelerator.device if accelerator.num_processes > 1 else wanted
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # whose the loop's streams and events are, and the kernels'
    return accelerator, device


def _lag(device: torch.device) -> int:
    """How many steps the host may be ahead of what it knows; see `Verdicts`."""
    return 1 if device.type == "cuda" else 0


def _resolved_precision(options: TrainOptions, device: torch.device) -> str:
    if options.precision != "auto":
        return options.precision
    precision = "bf16" if device.type == "cuda" else "fp32"
    _log.info("train.precision: auto -> %s on %s", precision, device)
    return precision


def _check_graphs(device: torch.device, ranks: int) -> None:
    """Raise `DraftsmithError` where there can be no `train.graphs`."""
    found = [
        *([f"the device is {device}, and graphs are CUDA's"] if device.type != "cuda" else []),
        *([f"{ranks} processes train, and graphs hold one process's step"] if ranks > 1 else []),
    ]
    if found:
        raise DraftsmithError(f"train.graphs is on, but {'; '.join(found)}: switch train.graphs off")


def _ends_for(ends: TargetEnds, device: torch.device, autocast: torch.dtype | None) -> TargetEnds:
    """The ends where training needs them; a copy, in fp32 when the run computes in fp32, so that the target's own
    stay."""
    dtype = ends.head_weight.dtype if autocast is not None else torch.float32
    if ends.head_weight.dtype == dtype and ends.head_weight.device == device:
        return ends
    return copy.deepcopy(ends).to(device, dtype)
