from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from draftsmith.algorithms.block_trainee import whole_blocks
from draftsmith.algorithms.metrics import label_metrics
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Computation, Terms
from draftsmith.errors import DraftsmithError
from draftsmith.training.evaluation import Evaluation, score, split_documents
from draftsmith.training.forward import DraftLoss
from tests.support.tiny_draft import tiny_draft
from tests.training.counting import MASK, batches_of, section

IDS = [f"sample-{i}" for i in range(57)]


def test_the_split_depends_on_ids_alone():
    training, held_out = split_documents(IDS, 0.1)
    assert len(held_out) == 6
    assert sorted(training + held_out) == list(range(57))
    reverse = list(reversed(IDS))
    again = split_documents(reverse, 0.1)[1]
    assert {IDS[i] for i in held_out} == {reverse[i] for i in again}


def test_a_larger_share_keeps_what_a_smaller_one_held_out():
    assert set(split_documents(IDS, 0.1)[1]) < set(split_documents(IDS, 0.3)[1])


def test_at_least_one_document_is_held_out_and_never_all():
    assert len(split_documents(IDS[:4], 0.01)[1]) == 1
    assert split_documents(IDS[:4], 0.0) == ([0, 1, 2, 3], [])
    with pytest.raises(DraftsmithError, match=r"eval_share is 0\.05 of 1 documents"):
        split_documents(IDS[:1], 0.05)


@pytest.fixture
def parts(target, store):
    draft = tiny_draft(target, block_size=4, mask_token_id=MASK, target_layer_ids=(1, 2))
    trainee = algorithm("dflash").trainee(draft, target.ends, section(), Computation(draft.device))
    loss = DraftLoss(draft, trainee, autocast=None)
    batches = batches_of(store, num_anchors=3)

    def evaluation(rank=0, num_ranks=1):
        documents = [3, 4, 9, 11, 17]
        return Evaluation(
            batches,
            documents,
            rows_per_forward=1,
            rank=rank,
            num_ranks=num_ranks,
        )

    return loss, evaluation


def test_two_evaluations_of_one_draft_are_equal_and_of_two_are_not(parts):
    loss, evaluation = parts
    accelerator = Accelerator(cpu=True)
    run = evaluation().run
    first = run(loss, torch.device("cpu"), 0.0, accelerator)
    assert run(loss, torch.device("cpu"), 0.0, accelerator) == first
    assert loss.training
    assert set(first) == {"loss", "accuracy", "accept_length"}
    with torch.no_grad():
        loss.draft.backbone.fc.weight.mul_(-1)
    assert run(loss, torch.device("cpu"), 0.0, accelerator)["loss"] != first["loss"]


def test_the_shares_of_the_processes_add_up_to_the_whole(parts):
    loss, evaluation = parts
    rows = sorted(row for forward in evaluation()._forwards for row in forward.rows)
    dealt = [evaluation(rank, 4)._forwards for rank in range(4)]
    assert {len(forwards) for forwards in dealt} == {1}
    assert sorted(row for forwards in dealt for f in forwards if f.counted for row in f.rows) == rows


def test_score_is_higher_for_the_better():
    averages = {"loss": 2.0, "accept_length": 1.5, "accuracy": [0.5]}
    assert score(averages, "loss") == -2.0
    assert score(averages, "accept_length") == 1.5
    assert score({"loss": None}, "loss") is None
    with pytest.raises(DraftsmithError, match=r"best_by is 'accept_length'.*reports loss"):
        score({"loss": 1.0}, "accept_length")


def test_blocks_are_predicted_from_their_anchor_whatever_training_shows(parts):
    loss, evaluation = parts
    accelerator = Accelerator(cpu=True)
    plain = evaluation()
    wanted = plain.run(loss, torch.device("cpu"), 0.0, accelerator)
    visible = replace(plain._batches.maker, visible_slots=lambda generator, count: np.full(count, 2))
    showing = replace(plain._batches, maker=visible)
    other = Evaluation(showing, [3, 4, 9, 11, 17], rows_per_forward=1, rank=0, num_ranks=1)
    assert other.run(loss, torch.device("cpu"), 0.0, accelerator) == wanted
    assert showing.micro_batch(other._forwards[0], epoch=0).examples.first_label.any()  # in training it would show


def test_only_whole_blocks_count(parts):
    loss, evaluation = parts
    every = replace(evaluation()._batches, num_anchors=50)  # all candidates
    blocks = every.micro_batch(evaluation()._forwards[0], epoch=0).examples
    whole = whole_blocks(blocks).label_mask
    supervised = blocks.label_mask.sum(-1)
    assert ((supervised > 0) & (supervised < 3)).any()  # some blocks are cut
    assert torch.equal(whole.any(-1), supervised == 3)
    assert torch.equal(whole.all(-1), supervised == 3)


def test_a_draft_that_is_always_right_has_the_accept_length_of_the_whole_block(parts):
    loss, evaluation = parts
    objective = loss.trainee.objective

    class Right:
        def terms(self, draft, ends, outputs):
            terms = objective.terms(draft, ends, outputs)
            right = label_metrics(outputs.blocks.labels, outputs.blocks)
            return Terms(terms.numerator, terms.denominator, {**terms.metrics, **right})

    loss.trainee.objective = Right()
    averages = evaluation().run(loss, torch.device("cpu"), 0.0, Accelerator(cpu=True))
    assert averages["accept_length"] == 4.0
    assert averages["accuracy"] == [1.0, 1.0, 1.0]
