"""Steps as CUDA graphs: what can be said without a GPU. Replays themselves: `tests/gpu/test_train_cuda.py`."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Computation, Work
from draftsmith.blocks.layout import BlockKind, BlockLayout
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance
from draftsmith.features.packing import collate
from draftsmith.features.reader import Store
from draftsmith.features.record import Record
from draftsmith.features.schema import FINAL_STATE, TAPS
from draftsmith.run.recipe import parse_recipe
from draftsmith.targets.target import Target
from draftsmith.training.forward import DraftLoss, share_done
from draftsmith.training.graphs import BatchGraphs, Outcome
from draftsmith.training.micro_batch import MicroBatch
from draftsmith.training.options import TrainOptions, check_replayable
from draftsmith.training.plan import Forward
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from tests.blocks.packed import anchors_of, blocks_of
from tests.training.counting import (
    BASE,
    QUIET,
    batches_of,
    counting_store,
    counting_target,
    identity_of,
    options,
    section,
)
from tests.training.recording import graphs_on_the_cpu


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
    blocks = micro_batch(1).examples
    places = blocks.label_mask.numel()
    for count in (1, 63, 64, 65, 1000, 30_200, 30_720):
        many = replace(blocks, max_labels=count, label_mask=torch.ones(1, 2048, 15, dtype=torch.bool))
        (found,) = many.rounded().counts
        assert count <= found <= count + max(64, count / 16)
    assert blocks.max_labels <= blocks.rounded().max_labels <= places


def test_a_batch_takes_the_tensors_of_another_in_their_order():
    first, second = micro_batch(1), micro_batch(2)
    given = iter(second.tensors().values())
    taken = first.mapped(lambda _: next(given))
    assert taken.packed.sample_ids == first.packed.sample_ids
    for name, tensor in second.examples.tensors().items():
        assert torch.equal(getattr(taken.examples, name), tensor), name
    for name in ("input_ids", "loss_mask", "positions", "document"):
        assert torch.equal(getattr(taken.packed, name), getattr(second.packed, name)), name
    assert taken.packed.features.keys() == second.packed.features.keys() == {TAPS, FINAL_STATE}
    assert all(torch.equal(taken.packed.features[name], second.packed.features[name]) for name in taken.packed.features)
    assert not torch.equal(first.packed.input_ids, second.packed.input_ids)


def test_what_cannot_be_replayed_is_refused_with_the_recipe():
    sections = {name: algorithm(name).section for name in ("dflash", "domino")}
    on = TrainOptions(graphs=True)
    check_replayable(sections["domino"](), on)
    check_replayable(sections["dflash"](), on)
    check_replayable(sections["dflash"](objective={"negatives": 64}), TrainOptions())
    with pytest.raises(DraftsmithError, match=r"negatives.*switch train.graphs off"):
        check_replayable(sections["dflash"](objective={"negatives": 64}), on)
    fields = {"run": "r", "target": {"path": "t"}, "train": {"graphs": True}}
    with pytest.raises(DraftsmithError, match=r"(?s)train is .*negatives"):
        parse_recipe({**fields, "draft": {"algorithm": "dflash", "objective": {"negatives": 64}}})
    with pytest.raises(ValidationError, match="rows_per_step 2 and rows_per_forward 1"):
        TrainOptions(graphs=True, rows_per_step=2, rows_per_forward=1)
    with pytest.raises(ValidationError, match="device 'cpu'"):
        TrainOptions(graphs=True, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no GPU")
def test_graphs_where_there_can_be_none_are_refused(tmp_path):
    target = counting_target()
    with pytest.raises(DraftsmithError, match=r"the device is cpu.*: switch train.graphs off"):
        train(
            section=section(),
            target=target,
            source=StoreSource(counting_store(tmp_path / "store", target)),
            run_dir=tmp_path / "run",
            options=options(graphs=True, device="auto", rows_per_forward=2),
            track=QUIET,
            provenance=Provenance(identity_of(target), None),
        )
    assert not (tmp_path / "run").exists()


class StepByStep:
    """A draft of one method, batches of one shape, and what a way of running them makes of every batch."""

    def __init__(self, store: Store, target: Target, name: str) -> None:
        head = {"domino": {"gru_hidden_dim": 12, "emb_dim": 10}, "dspark": {"markov_rank": 6}}
        method = algorithm(name)
        chosen = method.section(**{**BASE, "algorithm": name, **head.get(name, {})})
        config = draft_config(chosen, target.info)
        torch.manual_seed(3)
        draft = Draft.from_config(config).train()
        trainee = method.trainee(draft, target.ends, chosen, Computation(draft.device))
        self.loss = DraftLoss(draft, trainee, autocast=None)
        self.parameters = list(draft.parameters())
        made = batches_of(store, chosen=chosen, num_anchors=7, seed=1)
        self.batches = [made.micro_batch(Forward([[2, 5], [3]]), epoch=epoch) for epoch in range(5)]

    def results(self, way: Callable[[MicroBatch, Tensor], Outcome]) -> list[list[Tensor]]:
        """Numerator, denominator, metrics and gradients of each batch, at five places of the run."""
        found = []
        for number, batch in enumerate(self.batches):
            numerator, denominator, metrics = way(batch, share_done(number, len(self.batches), torch.device("cpu")))
            pairs = [tensor for name in sorted(metrics) for tensor in metrics[name]]
            gradients = [parameter.grad for parameter in self.parameters]
            found.append([tensor.detach().clone() for tensor in (numerator, denominator, *pairs, *gradients)])
            for parameter in self.parameters:
                parameter.grad = None
        return found

    def eagerly(self, batch: MicroBatch, progress: Tensor) -> Outcome:
        numerator, denominator, metrics = self.loss(batch, progress)
        numerator.backward()
        return numerator, denominator, metrics


@pytest.mark.parametrize("name", ["dflash", "domino", "dspark"])
def test_replays_follow_the_batch_and_the_place_in_the_run(tmp_path, monkeypatch, name):
    target = counting_target()
    steps = StepByStep(counting_store(tmp_path, target, documents=6, final_state=True), target, name)
    wanted = steps.results(steps.eagerly)
    made = graphs_on_the_cpu(monkeypatch)
    found = steps.results(BatchGraphs(steps.loss, steps.parameters).run)
    assert len(made) == 1
    for step, (one, other) in enumerate(zip(wanted, found, strict=True)):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=lambda m, step=step: f"step {step}: {m}")


def test_a_share_that_the_host_froze_is_seen(tmp_path, monkeypatch):
    """Mutated: the objective is told the number of the step that was captured."""
    target = counting_target()
    steps = StepByStep(counting_store(tmp_path, target, documents=6), target, "domino")
    wanted = steps.results(steps.eagerly)
    graphs_on_the_cpu(monkeypatch)

    def frozen(batch: MicroBatch, progress: Tensor) -> Outcome:
        return steps.loss(batch, torch.full((), progress.item(), dtype=torch.float64))

    found = steps.results(BatchGraphs(frozen, steps.parameters).run)
    # The gradient of the correction's output matrix, the last, grows as lambda falls: by 0.2 from step to step.
    norms = [(float(one[-1].norm()), float(other[-1].norm())) for one, other in zip(wanted, found, strict=True)]
    assert norms[1][1] == pytest.approx(norms[1][0], rel=1e-4)
    assert all(frozen < 0.8 * true for true, frozen in norms[2:])
