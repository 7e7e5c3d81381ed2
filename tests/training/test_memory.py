"""Options that trade memory and time change no number."""

import pytest
import torch

from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Computation
from draftsmith.training.forward import DraftLoss
from draftsmith.training.plan import Forward
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from tests.support.tiny_draft import tiny_draft
from tests.training.counting import MASK, QUIET, TAP_IDS, batches_of, options, section
from tests.training.test_train import entries, weights


def gradients(target, store, autocast, *, recompute=False):
    """(loss numerator, gradients by name, bytes kept for the backward) of one forward."""
    draft = tiny_draft(target, num_layers=3, block_size=4, mask_token_id=MASK, target_layer_ids=TAP_IDS)
    how = Computation(draft.device, autocast, recompute=recompute)
    trainee = algorithm("dflash").trainee(draft.train(), target.ends, section(), how)
    loss = DraftLoss(draft, trainee, autocast=autocast)
    kept = 0

    def count(tensor):
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        numerator, _, _ = loss(batches_of(store, num_anchors=8, seed=1).micro_batch(Forward([[2, 5]]), epoch=0), 0.0)
    numerator.backward()
    return numerator, {name: p.grad for name, p in draft.named_parameters()}, kept


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_gradient_checkpointing_keeps_less_and_changes_nothing(target, store, precision):
    plain, wanted, kept = gradients(target, store, precision)
    again, found, kept_less = gradients(target, store, precision, recompute=True)
    assert torch.equal(plain, again)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert kept_less < 0.5 * kept, (kept_less, kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiling for a CPU takes minutes")
def test_compiled_layers_train_alike(target, store, tmp_path):
    for how in (False, True):
        train(
            section=section(),
            target=target,
            source=StoreSource(store),
            run_dir=tmp_path / str(how),
            options=options(max_steps=3, compile=how, lr=1e-3, eval_share=0.0),
            track=QUIET,
        )
    losses = [[entry["loss"] for entry in entries(tmp_path / str(how), "train")] for how in (False, True)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    # AdamW first moves a weight by its gradient's sign: rounding of a gradient near zero shows in single weights.
    plain, fused = (weights(tmp_path / str(how)) for how in (False, True))
    assert max(float((plain[name] - fused[name]).abs().mean()) for name in plain) < 1e-5
