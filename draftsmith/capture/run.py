"""Capture: samples in, a finished feature store out."""

import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from draftsmith.base.progress import Progress, SilentProgress
from draftsmith.base.readable import readable_bytes, readable_duration
from draftsmith.capture.backends import BACKENDS, check_backend
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.pipeline import computed_batches, store_all
from draftsmith.capture.plan import (
    SizeEstimate,
    estimate_size,
    finished_samples,
    plan_batches,
    share_batches,
)
from draftsmith.capture.refusals import Reason, Refusals, accept
from draftsmith.capture.report import CaptureReport
from draftsmith.capture.room import check_room
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance
from draftsmith.features.manifest import STORE_DTYPES, StoreHeader
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import StoreWriter, claimed_by, finish_store, sole_writer
from draftsmith.parallel.processes import Processes, launched_processes
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.target import Target

_log = logging.getLogger(__name__)


def capture(
    target: Target | TargetInfo,
    samples: Sequence[Sample],
    layout: CaptureLayout,
    directory: Path | str,
    options: CaptureOptions,
    provenance: Provenance,
    progress: Progress | None = None,
) -> CaptureReport:
    """Run `target` over `samples` and keep the features that `layout` names (in `options.dtype`) as a store.

    `target` is a loaded `Target`, or what is known of one for a backend that runs the model elsewhere.

    A directory that an earlier, interrupted capture of the same samples left is gone on with: what is finished there is
    not computed again. Where a launcher has started several processes, each calls this with the same samples, computes
    its share and writes shards of its own into the one directory; all return the same report.

    Raises `DraftsmithError` before any work for: no samples, too many unusable ones, a directory with another store or
    other data, too little free disk (unless `options.force`); and during it, as soon as too many samples give NaN or
    Inf. Then what is finished stays for the next run.
    """
    start = time.monotonic()
    directory = Path(directory)
    layout = replace(layout, dtype=STORE_DTYPES[options.dtype])
    header = StoreHeader.for_layout(layout, provenance.target, provenance.tokenizer)
    if not samples:
        raise DraftsmithError("there are no samples to capture: the data is empty, or all of it was skipped")
    refusals = Refusals(len(samples), options.max_refused_share)
    longest = BACKENDS[options.backend].longest(target, layout, options)
    accepted = accept(samples, target.vocab_size, longest, refusals)
    refusals.check_share()

    def prepare() -> tuple[set[str], SizeEstimate]:
        finished = finished_samples(directory, samples) if claimed_by(directory, header) else set()
        estimate = estimate_size([sample for sample in accepted if sample.id not in finished], layout, directory)
        _log.info("capture: %s (%d samples finished before)", estimate, len(finished))
        check_room(estimate, layout, directory, options.force)
        StoreWriter(directory, header, options.shard_bytes).close()  # the header is there before others write
        with sole_writer(directory):  # nor is a process of an earlier capture still at work
            pass
        return finished, estimate

    with launched_processes() as processes:
        _check_same_samples(processes, samples)
        finished, estimate = processes.first(prepare)
        own = Refusals(len(samples), options.max_refused_share, dict(refusals.ids))
        captured = _compute_share(
            target, accepted, finished, header, directory, options, own, processes, progress or SilentProgress()
        )
        outcomes = processes.gather((captured, own.ids.get(Reason.NOT_FINITE, [])))
        for _, not_finite in outcomes:
            for sample_id in not_finite:
                refusals.add(Reason.NOT_FINITE, sample_id)

        def finish() -> CaptureReport:
            refusals.check_share()
            report = CaptureReport(
                directory=directory,
                manifest=finish_store(directory),
                estimate=estimate,
                captured=sum(count for count, _ in outcomes),
                resumed=len(finished),
                refused={reason: tuple(ids) for reason, ids in refusals.ids.items()},
                seconds=time.monotonic() - start,
            )
            report.write()
            return report

        return processes.first(finish)


def _compute_share(
    target: Target | TargetInfo,
    accepted: Sequence[Sample],
    finished: set[str],
    header: StoreHeader,
    directory: Path,
    options: CaptureOptions,
    refusals: Refusals,
    processes: Processes,
    progress: Progress,
) -> int:
    """Compute and store this process's share of the batches; returns the number of samples stored."""
    layout = header.layout
    unfinished = [
        batch
        for batch in plan_batches(accepted, options.tokens_per_batch)
        if any(sample.id not in finished for sample in batch)
    ]
    batches = share_batches(unfinished, processes.count)[processes.rank]
    tokens = sum(sample.input_ids.shape[0] for batch in batches for sample in batch)

    def say_rate(tokens_per_second: float) -> None:
        _log.info(
            "capture: about %s at %s tokens/s%s, if the disk takes %s/s",
            readable_duration(tokens / tokens_per_second),
            f"{tokens_per_second:,.0f}",
            f" in each of {processes.count} processes" if processes.count > 1 else "",
            readable_bytes(tokens_per_second * layout.bytes_per_token * processes.count),
        )

    with ExitStack() as stack:
        # Where there is nothing to compute, no engine is started; the first process has work if any has.
        backend = BACKENDS[options.backend].make(target, layout, options) if batches else None
        if backend is not None:
            stack.callback(backend.close)

        def check() -> None:
            if backend is not None:
                samples = [sample for batch in batches for sample in batch]
                check_backend(backend, target, layout, options, samples)

        processes.first(check)
        writer = stack.enter_context(StoreWriter(directory, header, options.shard_bytes, number=processes.rank))
        if backend is None:
            return 0
        computed = computed_batches(backend, batches, say_rate)
        return store_all(computed, tokens, finished, layout, writer, refusals, progress)


def _check_same_samples(processes: Processes, samples: Sequence[Sample]) -> None:
    if processes.count == 1:
        return
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.id.encode() + b"\0")
        digest.update(sample.input_ids.numpy().tobytes())
        digest.update(sample.loss_mask.to(torch.uint8).numpy().tobytes())
    found = processes.gather(digest.hexdigest())
    different = [rank for rank, other in enumerate(found) if other != found[0]]
    if different:
        raise DraftsmithError(
            f"processes {different} were given other samples than process 0; all must read the same conversations with "
            "the same settings"
        )
