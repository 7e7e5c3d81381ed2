"""Where training gets its documents and their features from: a store, or a target that runs beside it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.features.manifest import StoreHeader
from draftsmith.features.reader import Store
from draftsmith.features.record import Record


class FeatureSource(Protocol):
    """Documents by number, in any order; training puts them into one of its own that depends on their ids alone.

    header: of which target and layers the features are. fingerprint: what a resumed run compares. place: for people.
    live: the features are made when they are asked for, in this process; training asks one batch ahead, in a thread.
    """

    header: StoreHeader
    fingerprint: str
    place: str
    live: bool
    sample_ids: Sequence[str]
    lengths: Sequence[int]
    supervised: Sequence[int]

    def records(self, documents: Sequence[int]) -> list[Record]:
        """The records of the documents with these numbers; features may be on any device."""
        ...

    def texts(self, documents: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Of the documents with these numbers, without their features: input_ids [S] int64 and loss_mask [S] bool."""
        ...

    def carrying(self, features: Collection[str]) -> "FeatureSource":
        """The same documents; records need carry no other features than these."""
        ...


class StoreSource:
    """A feature store on disk. features: the names of the tensors to read (None: those that `store` reads)."""

    live = False

    def __init__(self, store: Store, features: Collection[str] | None = None) -> None:
        self.store = store.carrying(store.features if features is None else features)
        self.store.checked.share_memory_()  # a document that one worker found whole need not be checked by the next
        self.header: StoreHeader = store.manifest.header
        self.fingerprint = store.manifest.index.sha256
        self.place = str(store.directory)
        self.sample_ids: Sequence[str] = store.sample_ids
        self.lengths: Sequence[int] = store.lengths
        self.supervised: Sequence[int] = store.supervised

    def records(self, documents: Sequence[int]) -> list[Record]:
        return [self.store[document] for document in documents]

    def texts(self, documents: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        without_features = self.store.carrying(())
        for document in documents:
            record = without_features[document]
            yield record.input_ids, record.loss_mask

    def carrying(self, features: Collection[str]) -> "StoreSource":
        return StoreSource(self.store, features)


@dataclass(frozen=True)
class SourceCorpus:
    """Some documents of a source, as an `algorithms.trainee.Corpus`."""

    source: FeatureSource
    documents: Sequence[int]

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often each token is supervised in these documents: [vocab_size] int64."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for input_ids, loss_mask in self.source.texts(self.documents):
            counts += torch.bincount(input_ids[loss_mask], minlength=vocab_size)
        return counts
