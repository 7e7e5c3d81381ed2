"""Everything a training run needs, put together before anything is written: `prepare`."""

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import ProjectConfiguration

from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.section import DraftSection
from draftsmith.algorithms.trainee import Computation, Corpus
from draftsmith.base.devices import parse_device, resolve_device
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError, differences
from draftsmith.features.check import check_store
from draftsmith.features.identity import Provenance
from draftsmith.kernels.device import need_triton
from draftsmith.parallel.ranks import process_count
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.info import TargetInfo
from draftsmith.training.documents import tell_masked
from draftsmith.training.evaluation import Evaluation
from draftsmith.training.forward import DraftLoss
from draftsmith.training.loading import TrainingBatches
from draftsmith.training.micro_batch import BatchMaker
from draftsmith.training.options import TrackOptions, TrainOptions, check_replayable
from draftsmith.training.plan import StepPlan, check_rows_per_step
from draftsmith.training.source import FeatureSource, SourceCorpus
from draftsmith.training.start import Start, find_start
from draftsmith.training.steps import plan_steps
from draftsmith.training.tracking import wanted_trackers

_log = logging.getLogger(__name__)


class TrainingTarget(Protocol):
    """What training needs of the target: what its configuration says, and its two ends (a `Target`, or its
    `TargetOutline`)."""

    @property
    def info(self) -> TargetInfo: ...
    @property
    def ends(self) -> TargetEnds: ...


@dataclass(frozen=True)
class Training:
    """The parts of a run: where it starts, what it learns from, the module that it trains and what there is to do.

    evaluation: None where no document is held out.
    """

    start: Start
    options: TrainOptions
    source: FeatureSource
    accelerator: Accelerator
    device: torch.device
    plan: StepPlan
    total_steps: int
    batches: TrainingBatches
    evaluation: Evaluation | None
    loss: DraftLoss


def prepare(
    section: DraftSection,
    target: TrainingTarget,
    source: FeatureSource,
    run_dir: Path,
    options: TrainOptions,
    track: TrackOptions,
    *,
    provenance: Provenance | None,
    resume: bool,
) -> Training:
    """The parts of the run that these settings ask for (arguments as for `train`); writes nothing.

    Raises `DraftsmithError` for settings that cannot be trained, features that do not fit, and a directory that holds a
    run already.
    """
    check_replayable(section, options)
    start = _find_start(section, target, source, run_dir, options, resume=resume)
    method = algorithm(section.algorithm)
    layout = method.capture(start.config)
    origin = (None, None) if provenance is None else (provenance.target, provenance.tokenizer)
    check_store(source.header, layout, *origin)
    steps = plan_steps(source, options)
    _check_length(start, steps.total)
    tell_masked(source, start.config)
    source = source.carrying(tuple(layout.widths))

    accelerator, device = _accelerator(options, track, run_dir)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    if options.graphs:
        _check_graphs(device, ranks)
    check_rows_per_step(options.rows_per_step, options.rows_per_forward, ranks)
    autocast = torch.bfloat16 if _resolved_precision(options, device) == "bf16" else None

    maker = method.examples(start.config, section)
    made = BatchMaker(source, maker, options.tokens_per_row, options.num_anchors, options.seed)
    workers = options.workers(device)
    return Training(
        start=start,
        options=options,
        source=source,
        accelerator=accelerator,
        device=device,
        plan=steps.plan,
        total_steps=steps.total,
        batches=TrainingBatches(
            steps.plan, made, steps.documents, rank=rank, num_ranks=ranks, workers=workers, device=device
        ),
        evaluation=_evaluation(made, steps.held_out, options, rank, ranks) if steps.held_out else None,
        loss=_draft_loss(start, target, SourceCorpus(source, steps.documents), options, device, autocast),
    )


# --- where it starts, and what it learns from ------------------------------------------------------------------------


def _find_start(
    section: DraftSection,
    target: TrainingTarget,
    source: FeatureSource,
    run_dir: Path,
    options: TrainOptions,
    *,
    resume: bool,
) -> Start:
    """Where the run starts, checked against these settings, and told in the log."""
    start = find_start(section, target.info, run_dir, resume=resume)
    if resume and start.latest is None:
        _log.warning("%s holds no whole checkpoint to resume from; the run starts from the beginning", run_dir)
    asked = options.model_dump(mode="json")
    start.check(section.model_dump(mode="json"), asked, source.fingerprint)
    for line in start.lines():
        _log.info("%s", line)
    if start.record is not None:
        for name, before, now in differences(start.record.options, asked):
            _log.info("train.%s was %s, is %s from here on", name, before, now)
    return start


def _evaluation(made: BatchMaker, held_out: list[int], options: TrainOptions, rank: int, num_ranks: int) -> Evaluation:
    return Evaluation(made, held_out, rows_per_forward=options.rows_per_forward, rank=rank, num_ranks=num_ranks)


def _check_length(start: Start, total_steps: int) -> None:
    if start.latest is not None and start.latest.position.step > total_steps:
        raise DraftsmithError(
            f"{start.run_dir} has reached step {start.latest.position.step}, and this recipe ends at step "
            f"{total_steps}; raise train.max_steps or train.epochs"
        )


# --- what is trained -------------------------------------------------------------------------------------------------


def _draft_loss(
    start: Start,
    target: TrainingTarget,
    corpus: Corpus,
    options: TrainOptions,
    device: torch.device,
    autocast: torch.dtype | None,
) -> DraftLoss:
    """The draft with the weights that the run begins with, and its loss, on `device`."""
    method = algorithm(start.section.algorithm)
    torch.manual_seed(options.seed)
    draft = Draft.from_config(start.config)
    if start.warm is not None:
        start.warm.load_into(draft)
    elif start.latest is None:
        method.initialise(draft, target.ends, corpus)
    draft = draft.to(device, torch.float32)
    how = Computation(
        device,
        autocast,
        options.attention,
        recompute=options.gradient_checkpointing,
        compile_layers=device.type == "cuda" if options.compile == "auto" else options.compile,
    )
    trainee = method.trainee(draft, _ends_for(target.ends, device, autocast), start.section, how)
    return DraftLoss(draft, trainee, autocast=autocast)


def _ends_for(ends: TargetEnds, device: torch.device, autocast: torch.dtype | None) -> TargetEnds:
    """The ends where training needs them; a copy, in fp32 when the run computes in fp32, so that the target's own
    stay."""
    dtype = ends.head_weight.dtype if autocast is not None else torch.float32
    if ends.head_weight.dtype == dtype and ends.head_weight.device == device:
        return ends
    return copy.deepcopy(ends).to(device, dtype)


# --- where it computes -----------------------------------------------------------------------------------------------


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
