"""Training on a GPU: what `auto` picks there, against the plain way on the same device."""

import copy
import json

import pytest
import torch
from accelerate import Accelerator

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import algorithm
from draftsmith.blocks.masks import AttentionBackend
from draftsmith.drafts.draft import Draft
from draftsmith.training.batches import BlockSampler, Forward
from draftsmith.training.forward import DraftLoss, share_done
from draftsmith.training.options import TrainOptions
from draftsmith.training.parallel import Parallel
from draftsmith.training.record import find_checkpoint
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from draftsmith.training.update import Updater
from tests.training.counting import BASE, MASK, QUIET, counting_store, counting_target, options, section

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def target():
    return counting_target()


@pytest.fixture(scope="module")
def store(tmp_path_factory, target):
    return counting_store(tmp_path_factory.mktemp("features"), target)


def run(target, store, run_dir, **fields):
    chosen = options(device="cuda", data_workers=2, **fields)
    train(
        draft_section=section(head_dim=16),
        target=target,
        ends=target.ends,
        store=store,
        run_dir=run_dir,
        options=chosen,
        track=QUIET,
        resume=run_dir.exists(),
    )
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in lines if entry["kind"] == "train"]


def test_flex_and_dense_attention_train_alike(target, store, tmp_path):
    losses = [
        [entry["loss"] for entry in run(target, store, tmp_path / way, attention=way, precision="fp32")]
        for way in ("flex", "dense")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_the_defaults_of_cuda_learn(target, store, tmp_path):
    logged = run(
        target, store, tmp_path / "run", max_steps=120, rows_per_step=4, rows_per_forward=4, num_anchors=16, lr=1e-2
    )
    assert logged[-1]["loss"] < 0.2 * logged[0]["loss"]
    assert all(weight.dtype == torch.float32 for weight in find_checkpoint(tmp_path / "run", "last").weights().values())


def test_a_resumed_run_goes_on(target, store, tmp_path):
    straight = run(target, store, tmp_path / "straight", max_steps=6)
    run(target, store, tmp_path / "resumed", max_steps=6, save_every=3, keep_last=2)
    last = find_checkpoint(tmp_path / "resumed", "last").directory
    last.rename(last.with_suffix(".gone"))
    resumed = run(target, store, tmp_path / "resumed", max_steps=6)
    assert [entry["loss"] for entry in resumed] == pytest.approx([entry["loss"] for entry in straight], rel=1e-3)


def test_replayed_steps_are_the_eager_ones(target, store, tmp_path):
    """Batches of several shapes come up more than once, so that some steps are captured and some replayed."""
    fields = {"max_steps": 40, "rows_per_step": 2, "rows_per_forward": 2, "num_anchors": 8, "compile": False}
    eager, replayed = (
        [(entry["loss"], entry["accept_length"], entry["grad_norm"]) for entry in found]
        for found in (run(target, store, tmp_path / str(on), graphs=on, **fields) for on in (False, True))
    )
    assert len(eager) == len(replayed) == 40
    for one, other in zip(eager, replayed, strict=True):
        assert other == pytest.approx(one, rel=2e-3)


@pytest.mark.parametrize("name", ["dflash", "domino", "dspark"])
def test_a_step_never_waits_for_the_device(target, tmp_path, name):
    head = {"domino": {"gru_hidden_dim": 12, "emb_dim": 10}, "dspark": {"markov_rank": 6}}
    method = algorithm(name)
    chosen = method.section(**{**BASE, "algorithm": name, "head_dim": 16, **head.get(name, {})})
    config = draft_config(chosen, target)
    store = counting_store(tmp_path, target, final_state=method.capture(config).final_state)
    source = StoreSource(store, store.features)
    sampler = BlockSampler(source, method.block_layout(config), MASK, 48, 8, seed=1, visible_slots=None)
    batch = sampler.micro_batch(Forward([[2, 5], [3]]), epoch=0).to(torch.device("cuda"))
    loss = DraftLoss(
        Draft.from_config(config).cuda(),
        copy.deepcopy(target.ends).to("cuda", torch.bfloat16),
        method.objective(config, chosen),
        attention=AttentionBackend.ANCHORED,
        autocast=torch.bfloat16,
    ).train()
    updater = Updater(loss, Parallel(loss, "ddp", Accelerator(mixed_precision="no")), TrainOptions())
    for number in range(3):
        if number == 2:  # the first ones compile kernels and allocate
            torch.cuda.set_sync_debug_mode("error")
        try:
            updater.clear()
            numerator, denominator, _ = loss(batch, share_done(1, 2, torch.device("cuda")))
            numerator.backward()
            updater.apply(numerator.detach().double(), denominator.double(), 1e-4)
        finally:
            torch.cuda.set_sync_debug_mode("default")
