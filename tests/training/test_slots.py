"""Batches through slots are the batches that were put in."""

import multiprocessing
import shutil
from dataclasses import dataclass, replace

import pytest
import torch

from draftsmith.errors import DraftsmithError
from draftsmith.features.manifest import StoreError
from draftsmith.features.reader import Store
from draftsmith.training.loading import TrainingBatches
from draftsmith.training.plan import Forward, StepPlan
from draftsmith.training.read_ahead import tensors_of
from draftsmith.training.slots import Slots, pack
from draftsmith.training.source import StoreSource
from tests.training.counting import batches_of, counting_store

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Thing:
    name: str
    tensors: dict[str, torch.Tensor]
    more: list[torch.Tensor]


def thing(generator) -> Thing:
    return Thing(
        "à",
        {
            "half": torch.randn(3, 5, 7, generator=generator).to(torch.bfloat16),
            "whole": torch.randint(-9, 9, (11,), generator=generator),
            "none": torch.empty(0, 4),
        },
        [torch.rand(13, generator=generator) < 0.5, torch.randn(6, 4, generator=generator).T],
    )


def same(a, b) -> bool:
    pairs = list(zip(tensors_of(a), tensors_of(b), strict=True))
    return bool(pairs) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("shared", [False, True])
def test_what_comes_out_is_what_went_in(shared):
    generator = torch.Generator().manual_seed(3)
    slots = Slots(2, 4096, shared=shared)
    things = [thing(generator) for _ in range(2)]
    filled = [slots.filled(pack(each, number, slots.slot(number))) for number, each in enumerate(things)]
    found = [each.to(CPU) for each in filled]
    for before, after in zip(things, found, strict=True):
        assert after.name == before.name
        assert after.tensors.keys() == before.tensors.keys()
        assert same(after.tensors, before.tensors)
        assert all(torch.equal(x, y) for x, y in zip(after.more, before.more, strict=True))
    # What has left its slot is its own: the next batch there does not reach it.
    pack(thing(generator), 0, slots.slot(0))
    assert same(found[0].tensors, things[0].tensors)
    assert not same(filled[0].to(CPU).tensors, things[0].tensors)


def test_a_tensor_made_in_the_slot_is_not_copied():
    slots = Slots(1, 4096, shared=False)
    slot = slots.slot(0)
    slot.empty((5,), torch.bool)
    made = slot.empty((3, 7), torch.float32)
    used = slot.used
    packed = pack([made[:2], made[:0]], 0, slot)
    assert packed.used == used
    made.copy_(torch.arange(21.0).view(3, 7))  # after packing, and seen nevertheless
    found, nothing = slots.filled(packed).to(CPU)
    assert torch.equal(found, torch.arange(14.0).view(2, 7))
    assert nothing.shape == (0, 7)
    turned = pack(made.T, 0, slot)
    assert turned.used > used
    assert torch.equal(slots.filled(turned).to(CPU), torch.arange(21.0).view(3, 7).T)


def test_a_full_slot_and_full_memory_are_refused():
    with pytest.raises(DraftsmithError, match="in a slot of 512"):
        pack(torch.zeros(129), 0, Slots(1, 512, shared=False).slot(0))
    with pytest.raises(DraftsmithError, match=r"1000000 batches of 1,024 MiB.*train\.data_workers"):
        Slots(1_000_000, 2**30, shared=True)


@pytest.mark.parametrize("tokens_per_row", [23, 47])
def test_the_largest_micro_batch_has_room(target, tmp_path, tokens_per_row):
    store = counting_store(tmp_path, target, documents=7, final_state=True)
    maker = batches_of(store, num_anchors=99, tokens_per_row=tokens_per_row)
    rows = [[0], [1], [2]] if tokens_per_row == 23 else [[0, 1], [2, 3], [4, 5]]
    size = maker.largest_micro_batch(3)
    slot = Slots(1, size, shared=False).slot(0)
    packed = pack(maker.micro_batch(Forward(rows), 0, slot), 0, slot)
    assert size / 4 < packed.used <= size


CUDA = pytest.param(
    torch.device("cuda"),
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_that_workers_make_are_the_plain_ones(store, workers, device):
    """Three times as many batches as there are slots, against those that this process makes in new memory."""
    documents = list(range(len(store)))[::-2]
    lengths, names = ([values[number] for number in documents] for values in (store.lengths, store.sample_ids))
    plan = StepPlan(lengths, names, tokens_per_row=48, rows_per_step=2, rows_per_forward=2, seed=5)
    maker = batches_of(store)
    batches = TrainingBatches(plan, maker, documents, rank=0, num_ranks=1, workers=workers, device=device)
    plainly = batches_of(store)
    steps = 3 * (2 * workers + 1) + 3
    seen = 0
    for step in batches.steps(0, 1, steps):
        (forward,) = plan.forwards(step.epoch, step.step_in_epoch, 0, 1)
        rows = [[documents[index] for index in row] for row in forward.rows]
        plain = plainly.micro_batch(replace(forward, rows=rows), step.epoch)
        other = plainly.micro_batch(replace(forward, rows=rows), step.epoch + 1)
        (found,) = step.micro_batches
        assert {tensor.device.type for tensor in tensors_of(found)} == {device.type}
        found = found.to(CPU)
        assert found.packed.sample_ids == plain.packed.sample_ids
        assert found.work == plain.work
        assert found.examples.max_labels == plain.examples.max_labels
        assert same(found, plain)
        seen += not same(found, other)
    assert seen > steps / 2  # the next epoch's anchors are others
    source = maker.source
    assert isinstance(source, StoreSource)
    assert sorted(source.store.checked.nonzero().flatten().tolist()) == sorted(documents)  # by whichever process


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_damage_that_a_worker_meets_is_told_as_the_store_tells_it(store, tmp_path, workers):
    """In place of its batch, after the ones before it, without the worker's traceback."""
    directory = tmp_path / "store"
    shutil.copytree(store.directory, directory)
    (path,) = directory.glob("*.features.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last document's taps
    path.write_bytes(data)
    damaged, last = Store.open(directory), len(store) - 1
    with pytest.raises(StoreError, match=f"'doc-{last}' has CRC-32.*damaged") as plain:
        damaged[last]
    plan = StepPlan(store.lengths, store.sample_ids, tokens_per_row=48, rows_per_step=1, rows_per_forward=1, seed=5)
    sound = [last not in row for row in plan.rows(0)].index(False)
    assert sound > 1
    batches = TrainingBatches(
        plan, batches_of(damaged), list(range(len(store))), rank=0, num_ranks=1, workers=workers, device=CPU
    )
    steps = batches.steps(0, 0, plan.steps_in(0))
    for _ in range(sound):
        assert len(list(next(steps).micro_batches)) == 1
    hit = next(steps)
    try:
        next(hit.micro_batches)
    except StoreError as error:
        assert str(error) == str(plain.value)  # noqa: PT017  (pytest.raises would keep the error, and with it the workers)
    else:
        pytest.fail("the damage was not met")
    assert not multiprocessing.active_children()


class Defect(StoreSource):
    def records(self, documents):
        raise ZeroDivisionError("a defect")


def test_a_defect_in_a_worker_keeps_its_traceback(store):
    plan = StepPlan(store.lengths, store.sample_ids, tokens_per_row=48, rows_per_step=2, rows_per_forward=2, seed=5)
    maker = replace(batches_of(store), source=Defect(store, store.features))
    batches = TrainingBatches(plan, maker, list(range(len(store))), rank=0, num_ranks=1, workers=1, device=CPU)
    steps = batches.steps(0, 0, 1)
    step = next(steps)
    with pytest.raises(ZeroDivisionError, match=r"(?s)worker process.*in records.*a defect"):
        next(step.micro_batches)
    for worker in multiprocessing.active_children():  # torch's loader waits seconds for it, whenever it is collected
        worker.terminate()
        worker.join()


def test_an_abandoned_run_ends_its_workers(store):
    plan = StepPlan(store.lengths, store.sample_ids, tokens_per_row=48, rows_per_step=2, rows_per_forward=2, seed=5)
    maker = batches_of(store)
    batches = TrainingBatches(plan, maker, list(range(len(store))), rank=0, num_ranks=1, workers=1, device=CPU)
    steps = batches.steps(0, 0, 50)
    (first,) = next(steps).micro_batches
    assert len(multiprocessing.active_children()) == 1
    steps.close()
    assert not multiprocessing.active_children()
    steps = batches.steps(0, 0, 1)
    (again,) = next(steps).micro_batches
    assert same(first, again)
