from itertools import chain, pairwise

import pytest
import torch

from draftsmith.algorithms.trainee import Work
from draftsmith.errors import DraftsmithError
from draftsmith.training.loading import TrainingBatches
from draftsmith.training.plan import Forward, StepPlan, check_rows_per_step, deal
from tests.training.counting import batches_of


def plan_of(store, *, rows_per_step=4, rows_per_forward=1, seed=5) -> StepPlan:
    return StepPlan(
        store.lengths,
        store.sample_ids,
        tokens_per_row=48,
        rows_per_step=rows_per_step,
        rows_per_forward=rows_per_forward,
        seed=seed,
    )


def step_documents(plan, epoch, step, num_ranks):
    """The documents of a step over all ranks, as a sorted list (repeats would show)."""
    forwards = chain.from_iterable(plan.forwards(epoch, step, rank, num_ranks) for rank in range(num_ranks))
    return sorted(document for forward in forwards if forward.counted for row in forward.rows for document in row)


def test_an_epoch_holds_every_document_once(store):
    plan = plan_of(store)
    seen = [document for step in range(plan.steps_in(2)) for document in step_documents(plan, 2, step, 1)]
    assert sorted(seen) == list(range(len(store)))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("rows_per_forward", [1, 2])
def test_a_step_is_the_same_documents_whatever_the_number_of_processes(store, num_ranks, rows_per_forward):
    one, many = plan_of(store), plan_of(store, rows_per_forward=rows_per_forward)
    assert len(one.rows(1)) % 4  # the last step is a short one
    for step in range(one.steps_in(1)):
        assert step_documents(one, 1, step, 1) == step_documents(many, 1, step, num_ranks)
        assert len({len(many.forwards(1, step, rank, num_ranks)) for rank in range(num_ranks)}) == 1


def test_the_order_is_a_function_of_seed_and_epoch(store):
    assert plan_of(store).rows(1) == plan_of(store).rows(1)
    assert plan_of(store).rows(1) != plan_of(store).rows(2)
    assert plan_of(store, seed=6).rows(1) != plan_of(store).rows(1)


def test_a_process_without_a_row_repeats_one_that_does_not_count(store):
    assert deal([[7, 8]], 1, rank=1, num_ranks=2) == [Forward([[7, 8]], counted=False)]
    maker = batches_of(store)
    counted = maker.micro_batch(Forward([[7, 8]]), epoch=0)
    uncounted = maker.micro_batch(Forward([[7, 8]], counted=False), epoch=0)
    assert counted.examples.label_mask.any()
    assert counted.work.tokens == store.lengths[7] + store.lengths[8]
    assert not uncounted.examples.label_mask.any()
    assert uncounted.work == Work()


def test_positions_run_over_epochs_and_can_start_anywhere(store):
    plan = plan_of(store)
    all_positions = [position for position, _ in zip(plan.positions(0, 0), range(20), strict=False)]
    assert all_positions[0] == (0, 0)
    for before, after in pairwise(all_positions):
        assert plan.following(*before) == after
    assert next(plan.positions(*all_positions[9])) == all_positions[9]


def test_a_document_has_the_same_blocks_in_whatever_row(store):
    maker = batches_of(store)

    def inputs(rows, row, document):
        batch = maker.micro_batch(Forward(rows), epoch=3)
        blocks = batch.examples
        own = blocks.valid[row] & (batch.packed.document[row][blocks.anchors[row]] == document)
        return blocks.positions[row][own], blocks.input_ids[row][own], blocks.labels[row][own]

    alone = inputs([[4]], 0, 0)
    packed = inputs([[9], [2, 4]], 1, 1)
    assert len(alone[0]) == 5
    assert all(torch.equal(a, b) for a, b in zip(alone, packed, strict=True))


def test_worker_processes_change_nothing(store):
    def ids(workers):
        batches = TrainingBatches(
            plan_of(store),
            batches_of(store),
            list(range(len(store))),
            rank=0,
            num_ranks=1,
            workers=workers,
            device=torch.device("cpu"),
        )
        return [
            (
                step.epoch,
                step.step_in_epoch,
                [(b.packed.sample_ids, b.examples.anchors.tolist()) for b in step.micro_batches],
            )
            for step in batches.steps(0, 1, 5)
        ]

    assert ids(0) == ids(1)


def test_reading_batches_leaves_the_global_generator_alone(store):
    state = torch.get_rng_state()
    batches = TrainingBatches(
        plan_of(store),
        batches_of(store),
        list(range(len(store))),
        rank=0,
        num_ranks=1,
        workers=0,
        device=torch.device("cpu"),
    )
    for step in batches.steps(0, 0, 2):
        list(step.micro_batches)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_step_that_processes_cannot_share_is_refused():
    check_rows_per_step(8, 2, 4)
    with pytest.raises(DraftsmithError, match=r"rows_per_step is 6.*4 processes.*multiple of 4"):
        check_rows_per_step(6, 1, 4)
