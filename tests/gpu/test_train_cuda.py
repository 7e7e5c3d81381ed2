"""Training on a GPU: what `auto` picks there, against the plain way on the same device."""

import copy
import json

import pytest
import torch
from accelerate import Accelerator

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Computation
from draftsmith.drafts.draft import Draft
from draftsmith.training.forward import DraftLoss, share_done
from draftsmith.training.graphs import BatchGraphs
from draftsmith.training.options import TrainOptions
from draftsmith.training.parallel import Parallel
from draftsmith.training.plan import Forward
from draftsmith.training.record import find_checkpoint
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from draftsmith.training.update import Updater
from tests.training.counting import BASE, QUIET, batches_of, counting_store, counting_target, options

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def target():
    return counting_target()


@pytest.fixture(scope="module")
def store(tmp_path_factory, target):
    return counting_store(tmp_path_factory.mktemp("features"), target)


def section_of(name="dflash"):
    head = {"domino": {"gru_hidden_dim": 12, "emb_dim": 10}, "dspark": {"markov_rank": 6}}
    return algorithm(name).section(**{**BASE, "algorithm": name, "head_dim": 16, **head.get(name, {})})


def run(target, store, run_dir, name="dflash", **fields):
    chosen = options(device="cuda", data_workers=2, **fields)
    train(
        section=section_of(name),
        target=target,
        source=StoreSource(store),
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


@pytest.mark.parametrize(("name", "compiled"), [("dflash", False), ("dflash", True), ("domino", False)])
def test_replayed_steps_are_the_eager_ones(target, store, tmp_path, name, compiled):
    """Batches of several shapes come up more than once, so that some steps are captured and some replayed. Domino's
    objective is another one at every step."""
    fields = {"max_steps": 40, "rows_per_step": 2, "rows_per_forward": 2, "num_anchors": 8, "compile": compiled}
    metrics = ["loss", "accept_length", "grad_norm", *(["lambda", "base_loss"] if name == "domino" else [])]
    eager, replayed = (
        [[entry[metric] for metric in metrics] for entry in found]
        for found in (run(target, store, tmp_path / str(on), name, graphs=on, **fields) for on in (False, True))
    )
    assert len(eager) == len(replayed) == 40
    for step, (one, other) in enumerate(zip(eager, replayed, strict=True)):
        assert other == pytest.approx(one, rel=2e-3), step
    if name == "domino":
        shares = [entry[metrics.index("lambda")] for entry in replayed]
        assert shares == pytest.approx([1 - step / 40 for step in range(40)], rel=1e-6)


def test_one_graph_serves_every_place_in_the_run(target, store, tmp_path):
    """The same batch, replayed at other shares of the run, has the gradients that its eager step has there."""
    chosen = section_of("domino")
    method, config = algorithm("domino"), draft_config(chosen, target.info)
    batch = (
        batches_of(store, chosen=chosen, num_anchors=8, seed=1)
        .micro_batch(Forward([[2, 5], [3]]), epoch=0)
        .to(torch.device("cuda"))
    )
    draft = Draft.from_config(config).cuda()
    how = Computation(draft.device, attention="dense")
    trainee = method.trainee(draft, copy.deepcopy(target.ends).to("cuda"), chosen, how)
    loss = DraftLoss(draft, trainee, autocast=None).train()
    parameters = list(loss.parameters())
    graphs = BatchGraphs(loss, parameters)
    norms = []
    for number in (0, 3, 6, 9):  # the second is captured
        progress = share_done(number, 10, torch.device("cuda"))
        results = []
        for way in (graphs.run, graphs._eagerly):
            for parameter in parameters:
                parameter.grad = None
            numerator, _, metrics = way(batch, progress)
            # Copies: a replay writes where the one before it wrote.
            results.append([numerator.clone(), metrics["lambda"][0].clone(), *(p.grad.clone() for p in parameters)])
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-4)
        norms.append(float(results[0][-1].norm()))
    assert norms[1] < 0.8 * norms[2] < 0.8 * norms[3]  # W2's gradient grows as lambda falls: 0.3, 0.6, 0.9


@pytest.mark.parametrize("name", ["dflash", "domino", "dspark"])
def test_a_step_never_waits_for_the_device(target, tmp_path, name):
    method, chosen = algorithm(name), section_of(name)
    config = draft_config(chosen, target.info)
    store = counting_store(tmp_path, target, final_state=method.capture(config).final_state)
    batch = (
        batches_of(store, chosen=chosen, num_anchors=8, seed=1)
        .micro_batch(Forward([[2, 5], [3]]), epoch=0)
        .to(torch.device("cuda"))
    )
    draft = Draft.from_config(config).cuda()
    how = Computation(draft.device, torch.bfloat16, attention="anchored")
    trainee = method.trainee(draft, copy.deepcopy(target.ends).to("cuda", torch.bfloat16), chosen, how)
    loss = DraftLoss(draft, trainee, autocast=torch.bfloat16).train()
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
