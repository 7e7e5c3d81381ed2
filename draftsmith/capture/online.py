"""Features without a store: the frozen target runs beside the training and is asked for each batch as it comes."""

import hashlib
import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.capture.backends import BACKENDS, check_backend
from draftsmith.capture.options import CaptureOptions
from draftsmith.capture.plan import estimate_size, finished_samples, plan_batches
from draftsmith.capture.refusals import Refusals, accept
from draftsmith.capture.room import check_room
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.encoding import decode, encode, finite_rows
from draftsmith.features.identity import Provenance
from draftsmith.features.manifest import STORE_DTYPES, StoreHeader
from draftsmith.features.reader import Store
from draftsmith.features.record import Record
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import StoreWriter, claimed_by, finish_store
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.target import Target

_log = logging.getLogger(__name__)


class OnlineFeatures:
    """A source of training features (`training.source.FeatureSource`) that runs `target` as `capture` does.

    Records are what a capture with the same options stores: the same documents (unusable ones are left out, and too
    many of them are an error), in `options.dtype`, on the target's device. cache: a directory that is filled as a
    capture would fill it, and read once every document is there; work that an earlier run left in it counts. The target
    is used by one thread at a time: whoever runs it otherwise holds `busy`.
    """

    live = True

    def __init__(
        self,
        target: Target | TargetInfo,
        samples: Sequence[Sample],
        layout: CaptureLayout,
        options: CaptureOptions,
        provenance: Provenance,
        *,
        cache: Path | str | None = None,
    ) -> None:
        refusals = Refusals(len(samples), options.max_refused_share)
        self._layout = replace(layout, dtype=STORE_DTYPES[options.dtype])
        longest = BACKENDS[options.backend].longest(target, self._layout, options)
        self._samples = accept(samples, target.vocab_size, longest, refusals)
        refusals.check_share()
        self._backend = BACKENDS[options.backend].make(target, self._layout, options)
        check_backend(self._backend, target, self._layout, options, self._samples)
        self._tokens_per_batch = options.tokens_per_batch
        self.header = StoreHeader.for_layout(self._layout, provenance.target, provenance.tokenizer)
        self.fingerprint = _fingerprint(self.header, self._samples)
        self.place = "online features"
        self.sample_ids: Sequence[str] = [sample.id for sample in self._samples]
        self.lengths: Sequence[int] = [sample.input_ids.shape[0] for sample in self._samples]
        self.supervised: Sequence[int] = [int(sample.loss_mask.sum()) for sample in self._samples]
        self.busy = threading.Lock()
        self._cache = _Cache(Path(cache), self.header, self._samples, options) if cache is not None else None

    def records(self, documents: Sequence[int]) -> list[Record]:
        """The records of the documents with these numbers, as views of the target's batches.

        Raises `DraftsmithError` for features that are NaN or infinite, naming the document.
        """
        with self.busy:
            if self._cache is not None and self._cache.store is not None:
                store = self._cache.store
                return [store[store.index_of(self.sample_ids[document])] for document in documents]
            records = self._capture([self._samples[document] for document in documents])
            if self._cache is not None:
                self._cache.keep(records)
        return records

    def texts(self, documents: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and loss masks of the documents with these numbers; the target does not run."""
        return ((self._samples[d].input_ids, self._samples[d].loss_mask) for d in documents)

    def carrying(self, features: Collection[str]) -> "OnlineFeatures":
        """Itself: the target gives what its layout says, whatever is needed of it."""
        return self

    def _capture(self, samples: list[Sample]) -> list[Record]:
        found: dict[str, Record] = {}
        for batch in plan_batches(samples, self._tokens_per_batch):
            rounded = [encode(features, self._layout) for features in self._backend.features(batch)]
            finite = torch.stack([finite_rows(stored).all() for stored in rounded]).tolist()
            for sample, stored, good in zip(batch, rounded, finite, strict=True):
                if not good:
                    raise DraftsmithError(
                        f"the target gives NaN or Inf for sample {sample.id!r}; leave it out of the data, or load the "
                        "target in another target.dtype"
                    )
                features = decode(stored, self._layout, self._layout.widths)
                found[sample.id] = Record(sample.id, sample.input_ids, sample.loss_mask, features)
        return [found[sample.id] for sample in samples]

    def close(self) -> None:
        """Write what the cache still holds in memory."""
        with self.busy:
            if self._cache is not None:
                self._cache.close()
            self._backend.close()


class _Cache:
    """A store that fills up document by document. `store` is there once it is whole."""

    def __init__(
        self, directory: Path, header: StoreHeader, samples: Sequence[Sample], options: CaptureOptions
    ) -> None:
        self._directory = directory
        self._missing = {sample.id for sample in samples}
        if claimed_by(directory, header):
            self._missing -= finished_samples(directory, samples)
        missing = [sample for sample in samples if sample.id in self._missing]
        check_room(estimate_size(missing, header.layout, directory), header.layout, directory, options.force)
        self.store: Store | None = None
        self._writer: StoreWriter | None = StoreWriter(directory, header, options.shard_bytes)
        self._writer.__enter__()
        self._finish_if_whole()

    def keep(self, records: Sequence[Record]) -> None:
        """Stores the records that are not there yet; once all are, the cache is a store."""
        for record in records:
            if self._writer is not None and record.sample_id in self._missing:
                # Rounded already, to what encoding gives again.
                stored = encode(record.features, self._writer.layout)
                self._writer.add(replace(record, features={name: t.cpu().clone() for name, t in stored.items()}))
                self._missing.remove(record.sample_id)
        self._finish_if_whole()

    def _finish_if_whole(self) -> None:
        if not self._missing and self._writer is not None:
            self.close()
            finish_store(self._directory)
            self.store = Store.open(self._directory)
            _log.info("train.online.cache: every document is in %s, which is read from now on", self._directory)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
            self._writer = None


def _fingerprint(header: StoreHeader, samples: Sequence[Sample]) -> str:
    """What a resumed run compares: the target, the layers, and every document's id, tokens and loss mask."""
    digest = hashlib.sha256(header.model_dump_json().encode())
    for sample in sorted(samples, key=lambda sample: sample.id):
        digest.update(sample.id.encode() + b"\0")
        digest.update(sample.input_ids.numpy().tobytes())
        digest.update(sample.loss_mask.to(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
