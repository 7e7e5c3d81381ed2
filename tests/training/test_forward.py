import torch

from draftsmith.algorithms.block_trainee import BlockTrainee
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Computation, Terms
from draftsmith.blocks.masks import dense_attention
from draftsmith.features.schema import TAPS
from draftsmith.training.forward import DraftLoss, share_done
from draftsmith.training.plan import Forward
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft
from tests.training.counting import MASK, TAP_IDS, batches_of, counting_store, section


class Recorder:
    """An objective that keeps what it is given and depends on no parameter, as on a micro-batch without a label."""

    def terms(self, draft, ends, outputs):
        self.outputs = outputs
        zero = torch.zeros(())
        return Terms(zero, zero)


def batch_of(store):
    return batches_of(store, num_anchors=4, seed=1).micro_batch(Forward([[2, 5]]), epoch=0)


def loss_of(draft, target, objective):
    return DraftLoss(draft, BlockTrainee(draft, target.ends, objective, Computation(draft.device)), autocast=None)


def test_the_objective_gets_what_the_draft_makes_of_the_targets_rows(tmp_path):
    """With a target that scales its embeddings: drafts are given the bare rows, in training as in decoding."""
    target = tiny_target("gemma3", vocab_size=19)
    draft = tiny_draft(target, block_size=4, mask_token_id=MASK, target_layer_ids=TAP_IDS, input_embedding_scale=2.5)
    batch = batch_of(counting_store(tmp_path, target, documents=6))
    recorder = Recorder()
    loss = loss_of(draft, target, recorder)
    loss(batch, share_done(1, 4, draft.device))

    packed, blocks = batch.packed, batch.examples
    context = draft.context_keys_values(packed.features[TAPS], packed.positions)
    attend = dense_attention(blocks, packed.document, draft.attention_kinds)
    rows = target.ends.embedding_rows(blocks.input_ids)
    torch.testing.assert_close(recorder.outputs.hidden, draft(rows, blocks.positions, context, attend))
    assert (recorder.outputs.progress.item(), recorder.outputs.progress.dtype) == (0.25, torch.float64)
    assert recorder.outputs.final_state is None


def test_every_parameter_has_a_gradient_even_without_a_label(target, store):
    draft = tiny_draft(target, block_size=4, mask_token_id=MASK, target_layer_ids=TAP_IDS)
    loss = loss_of(draft, target, Recorder())
    numerator, _, _ = loss(batch_of(store), share_done(0, 1, draft.device))
    numerator.backward()
    assert all(p.grad is not None and not p.grad.any() for p in draft.parameters())


def test_the_targets_ends_are_neither_trained_nor_saved(target):
    draft = tiny_draft(target, block_size=4)
    objective = algorithm("dflash").objective(draft.config, section())
    loss = loss_of(draft, target, objective)
    assert {name.split(".", 1)[0] for name in loss.state_dict()} == {"draft"}
    vocabulary = target.ends.head_weight.shape
    assert all(tensor.shape != vocabulary for tensor in (*loss.buffers(), *loss.parameters()))
