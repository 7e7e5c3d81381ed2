"""From a store to the micro-batches of every optimiser step, in an order that only the seed and the epoch decide."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, islice

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from draftsmith.blocks.anchors import Anchors, VisibleSlots, sample_anchors
from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.build import build_blocks
from draftsmith.blocks.layout import BlockLayout
from draftsmith.errors import DraftsmithError
from draftsmith.features.batch import PackedBatch
from draftsmith.features.packing import collate, epoch_rows
from draftsmith.training.flops import Work
from draftsmith.training.read_ahead import read_ahead, tensors_of
from draftsmith.training.slots import Filled, Packed, Slot, Slots, aligned, pack
from draftsmith.training.source import FeatureSource

BATCHES_AHEAD = 2
"""Batches that each worker process makes ahead of the training."""

BLOCK_BUCKET = 32
"""The number of blocks a row is rounded up to a multiple of this, so that shapes repeat."""

Rows = list[list[int]]
"""Rows of documents, each document by its index in the store."""


@dataclass(frozen=True)
class Forward:
    """The rows of one forward of one process. All processes meet in every forward, so one that has no row left repeats
    another row that is not `counted`: it has no labels and adds nothing to any sum."""

    rows: Rows
    counted: bool = True


def deal(rows: Rows, rows_per_forward: int, rank: int, num_ranks: int) -> list[Forward]:
    """The forwards of process `rank`: it takes rows rank, rank + num_ranks, ..., `rows_per_forward` at a time.

    Every process gets the same number of forwards, and together they take every row once. rows must not be empty.
    """
    count = -(-len(rows) // (num_ranks * rows_per_forward))
    own = rows[rank::num_ranks]
    parts = [own[i * rows_per_forward : (i + 1) * rows_per_forward] for i in range(count)]
    return [Forward(part) if part else Forward(rows[:1], counted=False) for part in parts]


@dataclass(frozen=True)
class MicroBatch:
    """What one forward of one process consumes; `work`: how much of it counts, without what only fills the
    shape."""

    packed: PackedBatch
    blocks: Blocks
    work: Work

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`; shapes and dtypes stay."""
        return replace(self, packed=self.packed.to(device), blocks=self.blocks.to(device))


@dataclass(frozen=True)
class BlockSampler:
    """Draws the blocks of packed rows, and so turns records into micro-batches.

    visible_slots: how much of each block is visible, as for `sample_anchors`.
    """

    source: FeatureSource
    layout: BlockLayout
    mask_token_id: int
    tokens_per_row: int
    num_anchors: int
    seed: int
    visible_slots: VisibleSlots | None

    def micro_batch(self, forward: Forward, epoch: int, slot: Slot | None = None) -> MicroBatch:
        """The documents of `forward`, with anchors drawn for (seed, epoch, document id); their features lie in `slot`
        where one is given."""
        flat = iter(self.source.records([index for row in forward.rows for index in row]))
        records = [[next(flat) for _ in row] for row in forward.rows]
        packed = collate(records, self.tokens_per_row, None if slot is None else slot.empty)
        if not forward.counted:
            packed = replace(packed, loss_mask=torch.zeros_like(packed.loss_mask))
        anchors = sample_anchors(
            packed.loss_mask,
            packed.document,
            packed.sample_ids,
            self.layout,
            self.num_anchors,
            seed=self.seed,
            epoch=epoch,
            visible_slots=self.visible_slots,
            bucket=BLOCK_BUCKET,
        )
        blocks = build_blocks(
            packed.input_ids,
            packed.loss_mask,
            packed.positions,
            packed.document,
            anchors,
            self.layout,
            self.mask_token_id,
        )
        tokens = sum(len(record.input_ids) for row in records for record in row)
        return MicroBatch(packed, blocks, Work.of(tokens, packed.positions, blocks) if forward.counted else Work())

    def largest_micro_batch(self, rows: int) -> int:
        """How many bytes the tensors of a micro-batch of so many rows take in a slot, at most: a block a token."""
        one = torch.zeros(1, 1, dtype=torch.int64)
        anchors = Anchors(one, one.bool(), one + 1)
        blocks = build_blocks(one, one.bool(), one, one, anchors, self.layout, self.mask_token_id)
        layout = self.source.header.layout
        features = {
            name: one.new_zeros(1, 1, width, dtype=layout.feature_dtype) for name, width in layout.widths.items()
        }
        packed = PackedBatch(one, one.bool(), one, one, features, [])
        places = rows * (self.tokens_per_row + BLOCK_BUCKET)
        return sum(aligned(places * tensor.nbytes) for tensor in tensors_of(MicroBatch(packed, blocks, Work())))


class StepPlan:
    """Which rows every optimiser step consumes, for all processes together.

    An epoch is the documents shuffled by (seed, epoch) and packed into rows; step i of it takes rows
    [i * rows_per_step, (i + 1) * rows_per_step), the last one what is left. How many processes share a step changes
    nothing. lengths and names (for errors): of the documents, which the plan numbers from 0.
    """

    def __init__(
        self,
        lengths: list[int],
        names: list[str],
        *,
        tokens_per_row: int,
        rows_per_step: int,
        rows_per_forward: int,
        seed: int,
    ) -> None:
        self._rows_per_step = rows_per_step
        self.rows_per_forward = rows_per_forward

        @lru_cache(maxsize=2)
        def rows(epoch: int) -> Rows:
            return epoch_rows(lengths, tokens_per_row, seed, epoch, names)

        self.rows: Callable[[int], Rows] = rows

    def steps_in(self, epoch: int) -> int:
        """Optimiser steps of one epoch."""
        return -(-len(self.rows(epoch)) // self._rows_per_step)

    def following(self, epoch: int, step_in_epoch: int) -> tuple[int, int]:
        """The position after the given one."""
        return (epoch, step_in_epoch + 1) if step_in_epoch + 1 < self.steps_in(epoch) else (epoch + 1, 0)

    def positions(self, epoch: int, step_in_epoch: int) -> Iterator[tuple[int, int]]:
        """(epoch, step in it) of every step from the given one on, without end."""
        while True:
            for step in range(step_in_epoch, self.steps_in(epoch)):
                yield epoch, step
            epoch, step_in_epoch = epoch + 1, 0

    def forwards(self, epoch: int, step: int, rank: int, num_ranks: int) -> list[Forward]:
        """What one process forwards in one step."""
        start = step * self._rows_per_step
        return deal(self.rows(epoch)[start : start + self._rows_per_step], self.rows_per_forward, rank, num_ranks)


_Key = tuple[int, Forward]
"""The epoch and the forward of a micro-batch."""


class _MicroBatches:
    """Micro-batches by their keys. documents: the source's number of every document that keys number."""

    def __init__(self, sampler: BlockSampler, documents: list[int]) -> None:
        self.sampler = sampler
        self._documents = np.array(documents)  # one object, so that forked workers share its memory

    def make(self, key: _Key, slot: Slot | None = None) -> MicroBatch:
        epoch, forward = key
        rows = [[int(self._documents[index]) for index in row] for row in forward.rows]
        return self.sampler.micro_batch(replace(forward, rows=rows), epoch, slot)


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
        sampler: BlockSampler,
        documents: list[int],
        *,
        rank: int,
        num_ranks: int,
        workers: int,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._micro_batches = _MicroBatches(sampler, documents)
        self._rank = rank
        self._num_ranks = num_ranks
        self._workers = workers
        self._device = device
        self._live = sampler.source.live

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
        size = self._micro_batches.sampler.largest_micro_batch(self._plan.rows_per_forward)
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


def check_rows_per_step(rows_per_step: int, rows_per_forward: int, num_ranks: int) -> None:
    """Raise `DraftsmithError` unless a step is the same whole number of forwards in every process."""
    if rows_per_step % (num_ranks * rows_per_forward):
        raise DraftsmithError(
            f"train.rows_per_step is {rows_per_step}, with {num_ranks} processes x train.rows_per_forward "
            f"{rows_per_forward}; it must be a multiple of {num_ranks * rows_per_forward}"
        )
