"""Capture: samples in, a finished feature store out."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from draftsmith.capture.backend import CaptureBackend
from draftsmith.capture.hf import HfBackend
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.plan import SizeEstimate, estimate_size, finished_samples, plan_batches, readable_bytes
from draftsmith.capture.refusals import Reason, Refusals, accept, finite
from draftsmith.capture.report import CaptureReport
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance
from draftsmith.features.manifest import STORE_DTYPES, StoreHeader
from draftsmith.features.record import Record
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import StoreWriter, claimed_by, finish_store
from draftsmith.progress import Progress, SilentProgress
from draftsmith.targets.target import Target

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[[Target, CaptureLayout], CaptureBackend]] = {"hf": HfBackend}

# Batches computed but not yet stored; bounds the memory that a slow disk can take up.
MAX_WAITING_BATCHES = 4


def capture(
    target: Target,
    samples: Sequence[Sample],
    layout: CaptureLayout,
    directory: Path | str,
    options: CaptureOptions,
    provenance: Provenance,
    progress: Progress | None = None,
) -> CaptureReport:
    """Run `target` over `samples` and keep the features that `layout` names (in `options.dtype`) as a store.

    A directory that an earlier, interrupted capture of the same samples left is gone on with: what is finished there is
    not computed again. Raises `DraftsmithError` before any work for: no samples, too many unusable ones, a directory
    with another store or other data, too little free disk (unless `options.force`); and during it, as soon as too many
    samples give NaN or Inf. Then what is finished stays for the next run.
    """
    start = time.monotonic()
    directory = Path(directory)
    layout = replace(layout, dtype=STORE_DTYPES[options.dtype])
    header = StoreHeader.for_layout(layout, provenance.target, provenance.tokenizer)
    if not samples:
        raise DraftsmithError("there are no samples to capture: the data is empty, or all of it was skipped")
    refusals = Refusals(len(samples), options.max_refused_share)
    accepted = accept(samples, target.vocab_size, target.max_position_embeddings, refusals)
    refusals.check_share()

    finished = finished_samples(directory, accepted) if claimed_by(directory, header) else set()
    estimate = estimate_size([sample for sample in accepted if sample.id not in finished], layout, directory)
    logger.info("capture: %s (%d samples finished before)", estimate, len(finished))
    check_room(estimate, layout, directory, options.force)

    backend = BACKENDS[options.backend](target, layout)
    batches = [
        batch
        for batch in plan_batches(accepted, options.tokens_per_batch)
        if any(sample.id not in finished for sample in batch)
    ]
    with StoreWriter(directory, header, options.shard_bytes) as writer:
        captured = _run(backend, batches, finished, layout, writer, refusals, progress or SilentProgress())
    report = CaptureReport(
        directory=directory,
        manifest=finish_store(directory),
        estimate=estimate,
        captured=captured,
        resumed=len(finished),
        refused={reason: tuple(ids) for reason, ids in refusals.ids.items()},
        seconds=time.monotonic() - start,
    )
    report.write()
    return report


def check_room(estimate: SizeEstimate, layout: CaptureLayout, directory: Path, force: bool) -> None:
    """Raise `DraftsmithError` where the estimated bytes do not fit on the disk; with `force`, only warn."""
    if estimate.bytes <= estimate.free_bytes:
        return
    shortage = (
        f"{directory} needs {readable_bytes(estimate.bytes)} for {estimate.tokens:,} tokens of "
        f"{layout.bytes_per_token:,} bytes, and {readable_bytes(estimate.free_bytes)} are free"
    )
    if not force:
        raise DraftsmithError(
            f"{shortage}: free some, capture fewer samples or fewer layers, or start anyway with capture.force=true"
        )
    logger.warning("%s; started anyway (capture.force)", shortage)


def _run(
    backend: CaptureBackend,
    batches: Sequence[Sequence[Sample]],
    finished: set[str],
    layout: CaptureLayout,
    writer: StoreWriter,
    refusals: Refusals,
    progress: Progress,
) -> int:
    """Compute and store `batches`, less what is finished; returns the number of samples stored.

    One thread computes, another stores (hashing and writing release the interpreter); the queue between is bounded.
    """
    captured = 0
    total = sum(sample.input_ids.shape[0] for batch in batches for sample in batch)
    waiting: deque[Future[None]] = deque()
    with progress.stage("capture", total=total, unit="tokens") as stage, ThreadPoolExecutor(1) as executor:
        for batch in batches:
            records = _records(batch, backend.features(batch), finished, layout, refusals)
            waiting.append(executor.submit(_store, writer, records))
            if len(waiting) > MAX_WAITING_BATCHES:
                waiting.popleft().result()  # raises here what failed there
            captured += len(records)
            stage.advance(sum(sample.input_ids.shape[0] for sample in batch))
        for future in waiting:
            future.result()
    return captured


def _records(
    batch: Sequence[Sample],
    computed: list[dict[str, Tensor]],
    finished: set[str],
    layout: CaptureLayout,
    refusals: Refusals,
) -> list[Record]:
    """The records of the batch's unfinished samples with finite features, on the CPU in the store's dtype."""
    stored = [{name: tensor.to(layout.dtype) for name, tensor in features.items()} for features in computed]
    records: list[Record] = []
    # Checked after rounding to the store's dtype: that is what training reads.
    for sample, features, good in zip(batch, stored, finite(stored), strict=True):
        if sample.id in finished:
            continue
        if not good:
            refusals.add(Reason.NOT_FINITE, sample.id)
            refusals.check_share()
            continue
        on_cpu = {name: tensor.cpu() for name, tensor in features.items()}
        records.append(Record(sample.id, sample.input_ids, sample.loss_mask, on_cpu))
    return records


def _store(writer: StoreWriter, records: Sequence[Record]) -> None:
    for record in records:
        writer.add(record)
