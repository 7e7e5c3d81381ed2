"""Steps as CUDA graphs: what can be said without a GPU. Replays themselves: `tests/gpu/test_train_cuda.py`."""

from dataclasses import replace

import pytest
import torch

from draftsmith.algorithms.registry import algorithm
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.errors import DraftsmithError
from draftsmith.features.packing import collate
from draftsmith.features.record import Record
from draftsmith.features.schema import FINAL_STATE, TAPS
from draftsmith.training.batches import MicroBatch
from draftsmith.training.flops import Work
from draftsmith.training.graphs import _tensors, _with_tensors, rounded_labels
from draftsmith.training.run import train
from tests.blocks.packed import anchors_of, blocks_of
from tests.training.counting import QUIET, counting_store, counting_target, identity_of, options, section


def micro_batch(seed: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    layout = BlockLayout(BlockKind.ANCHOR_KNOWN, 4)
    records = [
        Record(
            f"{seed}-{length}",
            torch.randint(60, (length,), generator=generator),
            torch.rand(length, generator=generator) < 0.8,
            {name: torch.randn(length, width, generator=generator) for name, width in ((TAPS, 6), (FINAL_STATE, 3))},
        )
        for length in (31, 12)
    ]
    batch = collate([records], 47)
    return MicroBatch(batch, blocks_of(batch, layout, anchors_of(batch, layout, 9)), Work())


def test_labels_are_rounded_up_a_little_and_not_beyond_their_places():
    batch = micro_batch(1)
    places = batch.blocks.label_mask.numel()
    for count in (1, 63, 64, 65, 1000, 30_200, 30_720):
        many = replace(batch.blocks, max_labels=count, label_mask=torch.ones(1, 2048, 15, dtype=torch.bool))
        found = rounded_labels(replace(batch, blocks=many))
        assert count <= found <= count + max(64, count / 16)
    assert batch.blocks.max_labels <= rounded_labels(batch) <= places


def test_a_batch_takes_the_tensors_of_another_in_their_order():
    first, second = micro_batch(1), micro_batch(2)
    taken = _with_tensors(first, _tensors(second))
    assert taken.packed.sample_ids == first.packed.sample_ids
    for name, tensor in second.blocks.tensors().items():
        assert torch.equal(getattr(taken.blocks, name), tensor), name
    for name in ("input_ids", "loss_mask", "positions", "document"):
        assert torch.equal(getattr(taken.packed, name), getattr(second.packed, name)), name
    assert taken.packed.features.keys() == second.packed.features.keys()
    assert all(torch.equal(taken.packed.features[name], second.packed.features[name]) for name in taken.packed.features)
    assert not torch.equal(first.packed.input_ids, second.packed.input_ids)


def test_which_objectives_do_the_same_work_at_every_step():
    sections = {name: algorithm(name).section for name in ("dflash", "domino", "dspark")}
    assert algorithm("dflash").replayable(sections["dflash"]())
    assert not algorithm("dflash").replayable(sections["dflash"](objective={"negatives": 64}))
    assert not algorithm("domino").replayable(sections["domino"]())
    assert algorithm("domino").replayable(sections["domino"](objective={"lambda_start": 0.0}))
    assert algorithm("dspark").replayable(sections["dspark"]())


def test_graphs_where_there_can_be_none_are_refused(tmp_path):
    target = counting_target()
    with pytest.raises(DraftsmithError, match=r"the device is cpu.*; a step is 2 forwards.*: switch train.graphs off"):
        train(
            draft_section=section(),
            target=target,
            ends=target.ends,
            store=counting_store(tmp_path / "store", target),
            run_dir=tmp_path / "run",
            options=options(graphs=True, rows_per_step=2, rows_per_forward=1),
            track=QUIET,
            target_identity=identity_of(target),
        )
    assert not (tmp_path / "run").exists()
