"""The micro-batches of every optimiser step, read ahead of the training and moved to its device."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from draftsmith.errors import DraftsmithError
from draftsmith.training.micro_batch import BatchMaker, MicroBatch
from draftsmith.training.plan import Forward, StepPlan
from draftsmith.training.read_ahead import read_ahead
from draftsmith.training.slots import Filled, Packed, Slot, Slots, pack

BATCHES_AHEAD = 2
"""Batches that each worker process makes ahead of the training."""

_Key = tuple[int, Forward]
"""The epoch and the forward of a micro-batch."""


class _MicroBatches:
    """Micro-batches by their keys. documents: the source's number of every document that keys number."""

    def __init__(self, batches: BatchMaker, documents: list[int]) -> None:
        self.batches = batches
        self._documents = np.array(documents)  # one object, so that forked workers share its memory

    def make(self, key: _Key, slot: Slot | None = None) -> MicroBatch:
        epoch, forward = key
        rows = [[int(self._documents[index]) for index in row] for row in forward.rows]
        return self.batches.micro_batch(replace(forward, rows=rows), epoch, slot)


@dataclass(frozen=True)
class _InSlots(Dataset[Packed | DraftsmithError]):
    """Makes micro-batches in slots, in the DataLoader's workers, which receive (key, slot) from the main process.

    A `DraftsmithError` is handed over in place of its batch: one that a worker raised, the loader would raise again
    with the worker's traceback for its message.
    """

    micro_batches: _MicroBatches
    slots: Slots

    def __getitem__(self, item: tuple[_Key, int]) -> Packed | DraftsmithError:
        key, number = item
        slot = self.slots.slot(number)
        try:
            return pack(self.micro_batches.make(key, slot), number, slot)
        except DraftsmithError as error:
            return error


def _unpacked(made: Iterable[Packed | DraftsmithError], slots: Slots) -> Iterator[Filled[MicroBatch]]:
    """The batches that `_InSlots` made, in `slots`; raises the `DraftsmithError` that came in place of one."""
    for each in made:
        if isinstance(each, DraftsmithError):
            try:
                raise each
            finally:
                del each  # else error and frame hold each other, and the loader's workers outlive the error
        yield slots.filled(each)


@dataclass(frozen=True)
class Step:
    """One optimiser step of one process: where it stands, and its micro-batches, to be used up before the next step."""

    epoch: int
    step_in_epoch: int
    num_forwards: int
    micro_batches: Iterator[MicroBatch]


class TrainingBatches:
    """The steps of one process, with micro-batches on `device`.

    They are read ahead by `workers` processes (0: made when they are asked for), or by a thread where the source is
    live; on a GPU they are copied there ahead, too. documents: the source's number of every document that the plan
    numbers. Raises `DraftsmithError` where there is too little shared memory for the workers, and, in place of the
    batch that it hits, what the source raises, from a worker as from this process.
    """

    def __init__(
        self,
        plan: StepPlan,
        batches: BatchMaker,
        documents: list[int],
        *,
        rank: int,
        num_ranks: int,
        workers: int,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._micro_batches = _MicroBatches(batches, documents)
        self._rank = rank
        self._num_ranks = num_ranks
        self._workers = workers
        self._device = device
        self._live = batches.source.live

    def steps(self, epoch: int, step_in_epoch: int, count: int) -> Generator[Step, None, None]:
        """`count` steps, from the given one on."""
        positions = list(islice(self._plan.positions(epoch, step_in_epoch), count))
        batches = self._live_batches(positions) if self._live else self._loaded_batches(positions)
        with closing(batches):
            for position in positions:
                number = len(self._plan.forwards(*position, self._rank, self._num_ranks))
                yield Step(*position, number, islice(batches, number))

    def _loaded_batches(self, positions: list[tuple[int, int]]) -> Generator[MicroBatch, None, None]:
        # The loader has so many keys at its workers at most. One batch more is on its way to the device, and its slot
        # is free before the loader is asked for the next: slots can go round.
        count = self._workers * BATCHES_AHEAD + 1
        size = self._micro_batches.batches.largest_micro_batch(self._plan.rows_per_forward)
        slots = Slots(count, size, shared=self._workers > 0)
        loader = DataLoader(
            _InSlots(self._micro_batches, slots),
            sampler=zip(self._keys(positions), cycle(range(count))),  # any iterable of the dataset's keys will do
            batch_size=None,
            num_workers=self._workers,
            prefetch_factor=BATCHES_AHEAD if self._workers else None,
            generator=torch.Generator(),  # the loader draws a seed; the run's own generator must not move
        )
        packed = iter(loader)  # starts the workers, before there is a thread
        with slots.pinned(self._device), closing(self._moved(_unpacked(packed, slots))) as batches:
            yield from batches

    def _moved(self, filled: Iterator[Filled[MicroBatch]]) -> Generator[MicroBatch, None, None]:
        if self._device.type == "cuda":
            return read_ahead(filled, self._device)  # copied there beside the work on the batch before
        return (batch.to(self._device) for batch in filled)

    def _live_batches(self, positions: list[tuple[int, int]]) -> Generator[MicroBatch, None, None]:
        return read_ahead((self._micro_batches.make(key) for key in self._keys(positions)), self._device)

    def _keys(self, positions: list[tuple[int, int]]) -> Iterator[_Key]:
        for position in positions:
            for forward in self._plan.forwards(*position, self._rank, self._num_ranks):
                yield position[0], forward
