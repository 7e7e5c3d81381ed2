"""Batches through the target and into a store: computing, moving and storing at the same time."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.base.progress import Progress
from draftsmith.capture.backend import CaptureBackend
from draftsmith.capture.refusals import Reason, Refusals
from draftsmith.capture.transfer import Arriving, HostTransfer
from draftsmith.data.sample import Sample
from draftsmith.features.encoding import encode, finite_rows
from draftsmith.features.record import Record
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import StoreWriter

# Batches on their way between device and writer; bounds the memory that a slow disk can take up.
MAX_WAITING_BATCHES = 4
# From so many batches on, the first is computed twice for its time: a first forward also loads and picks kernels.
REHEARSED = 20

_FINITE = "finite"


class Computed(NamedTuple):
    """A batch and its features, as `CaptureBackend.features` gives them."""

    batch: Sequence[Sample]
    features: list[dict[str, Tensor]]


def computed_batches(
    backend: CaptureBackend, batches: Sequence[Sequence[Sample]], say_rate: Callable[[float], None]
) -> Iterator[Computed]:
    """The batches with their features, each computed when it is asked for.

    The first one's time is measured before any is given out: `say_rate` gets the tokens a second.
    """
    if not batches:
        return iter(())
    start = time.perf_counter()
    first = _timed(backend, batches[0])
    if len(batches) > REHEARSED:
        start = time.perf_counter()
        first = _timed(backend, batches[0])
    say_rate(sum(sample.input_ids.shape[0] for sample in batches[0]) / (time.perf_counter() - start))
    rest = (Computed(batch, backend.features(batch)) for batch in islice(batches, 1, None))
    return chain([first], rest)


def _timed(backend: CaptureBackend, batch: Sequence[Sample]) -> Computed:
    """One batch, complete on its device."""
    features = backend.features(batch)
    device = next(iter(features[0].values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Computed(batch, features)


def store_all(
    computed: Iterator[Computed],
    tokens: int,
    finished: set[str],
    layout: CaptureLayout,
    writer: StoreWriter,
    refusals: Refusals,
    progress: Progress,
) -> int:
    """Store the batches, less the samples that are `finished`; returns the number of samples stored.

    This thread computes; while a GPU works on a batch, the one before it travels to the host; a second thread cuts it
    into records; the writer's own threads hash and write shards. Queues between them are bounded. Samples whose
    features are not finite are refused; raises `DraftsmithError` as soon as they are too many.
    """
    captured = 0
    transfer = HostTransfer()
    arriving: deque[tuple[Sequence[Sample], Arriving]] = deque()
    waiting: deque[Future[None]] = deque()
    with progress.stage("capture", total=tokens, unit="tokens") as stage, ThreadPoolExecutor(1) as storing:

        def settle() -> int:
            batch, arrived = arriving.popleft()
            arrived.wait()
            kept = _kept(batch, arrived, finished, refusals)
            waiting.append(storing.submit(_store, writer, batch, arrived, kept))
            while waiting and (len(waiting) > MAX_WAITING_BATCHES or waiting[0].done()):
                waiting.popleft().result()  # raises here what failed there
            stage.advance(sum(sample.input_ids.shape[0] for sample in batch))
            return sum(kept)

        for batch, features in computed:
            arriving.append((batch, transfer.start(_stored(features, layout))))
            # What is on the host already is looked at at once; a GPU is given the next batch first.
            while arriving and (arriving[0][1].lasting or len(arriving) > 1):
                captured += settle()
        while arriving:
            captured += settle()
        for future in waiting:
            future.result()
    return captured


def _stored(features: list[dict[str, Tensor]], layout: CaptureLayout) -> dict[str, Tensor]:
    """The batch's tensors as the store holds them, samples end to end [N, width], and which rows are finite [N].

    Checked after rounding to the store's dtype: that is what training reads.
    """
    stored = encode({name: torch.cat([one[name] for one in features]) for name in layout.widths}, layout)
    return stored | {_FINITE: finite_rows(stored)}


def _kept(batch: Sequence[Sample], arrived: Arriving, finished: set[str], refusals: Refusals) -> list[bool]:
    """Which samples of the batch are to be stored; the others are finished, or refused here."""
    lengths = [sample.input_ids.shape[0] for sample in batch]
    kept = []
    for sample, rows in zip(batch, arrived.tensors[_FINITE].split(lengths), strict=True):
        unfinished = sample.id not in finished
        finite = bool(rows.all())
        if unfinished and not finite:
            refusals.add(Reason.NOT_FINITE, sample.id)
            refusals.check_share()
        kept.append(unfinished and finite)
    return kept


def _store(writer: StoreWriter, batch: Sequence[Sample], arrived: Arriving, kept: Sequence[bool]) -> None:
    try:
        end = 0
        for sample, keep in zip(batch, kept, strict=True):
            start, end = end, end + sample.input_ids.shape[0]
            if not keep:
                continue
            rows = {name: tensor[start:end] for name, tensor in arrived.tensors.items() if name != _FINITE}
            features = rows if arrived.lasting else {name: tensor.clone() for name, tensor in rows.items()}
            writer.add(Record(sample.id, sample.input_ids, sample.loss_mask, features))
    finally:
        arrived.release()
