"""What one forward of one process consumes, and how it is made of records."""

from dataclasses import dataclass, replace

import torch

from draftsmith.algorithms.trainee import AnyExampleMaker, Draw, Examples, Work
from draftsmith.base.tensor_fields import TensorFields
from draftsmith.features.batch import PackedBatch
from draftsmith.features.packing import collate
from draftsmith.training.plan import Forward
from draftsmith.training.slots import Slot, aligned
from draftsmith.training.source import FeatureSource


@dataclass(frozen=True)
class MicroBatch(TensorFields):
    """Packed rows, and what the method learns from them; `work`: how much of it counts, without what only fills the
    shape."""

    packed: PackedBatch
    examples: Examples
    work: Work


@dataclass(frozen=True)
class BatchMaker:
    """Turns records into micro-batches, in whatever process. num_anchors, seed: as for `Draw`."""

    source: FeatureSource
    maker: AnyExampleMaker
    tokens_per_row: int
    num_anchors: int
    seed: int

    def micro_batch(self, forward: Forward, epoch: int, slot: Slot | None = None) -> MicroBatch:
        """The documents of `forward`, with examples drawn for (seed, epoch, document id); their features lie in `slot`
        where one is given."""
        packed = self._packed(forward, slot)
        return self._batch(forward, packed, self.maker.examples(packed, self._draw(epoch)))

    def held_out(self, forward: Forward) -> MicroBatch:
        """The documents of `forward`, to be evaluated on: the same batch every time."""
        packed = self._packed(forward, None)
        return self._batch(forward, packed, self.maker.held_out(packed, self._draw(0)))

    def largest_micro_batch(self, rows: int) -> int:
        """How many bytes the tensors of a micro-batch of this many rows take in a slot, at most."""
        layout, shape = self.source.header.layout, (rows, self.tokens_per_row)
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        features = {
            name: torch.empty(*shape, width, dtype=layout.feature_dtype, device="meta")
            for name, width in layout.widths.items()
        }
        packed = PackedBatch(ids, ids.bool(), ids, ids, features, [])
        batch = MicroBatch(packed, self.maker.largest(*shape), Work())
        return sum(aligned(tensor.nbytes) for tensor in batch.tensors().values())

    def _draw(self, epoch: int) -> Draw:
        return Draw(self.seed, epoch, self.num_anchors)

    def _packed(self, forward: Forward, slot: Slot | None) -> PackedBatch:
        flat = iter(self.source.records([index for row in forward.rows for index in row]))
        records = [[next(flat) for _ in row] for row in forward.rows]
        packed = collate(records, self.tokens_per_row, None if slot is None else slot.empty)
        return packed if forward.counted else replace(packed, loss_mask=torch.zeros_like(packed.loss_mask))

    def _batch(self, forward: Forward, packed: PackedBatch, examples: Examples) -> MicroBatch:
        return MicroBatch(packed, examples, self.maker.work(packed, examples) if forward.counted else Work())
