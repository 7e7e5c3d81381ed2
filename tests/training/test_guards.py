import json

import pytest
import torch

from draftsmith.features.manifest import StoreHeader
from draftsmith.features.reader import Store
from draftsmith.features.record import Record
from draftsmith.features.shards import StoreWriter, finish_store
from draftsmith.training import loop as loop_module
from draftsmith.training.checkpoint import RunCheckpoints
from draftsmith.training.guards import MicroBatchRecord, NonFiniteError, StepRecord, Verdicts, find_non_finite
from draftsmith.training.run import train
from draftsmith.training.source import StoreSource
from draftsmith.training.update import Update
from tests.training.counting import QUIET, counting_store, identity_of, options, section


@pytest.fixture
def poisoned(tmp_path, target) -> Store:
    """The counting store with an infinite feature in one document, and documents as long as a row each."""
    source = counting_store(tmp_path / "clean", target, documents=8)
    header = StoreHeader.for_layout(source.manifest.layout, identity_of(target), None)
    with StoreWriter(tmp_path / "poisoned", header) as writer:
        for record in source:
            features = {name: tensor.clone() for name, tensor in record.features.items()}
            if record.sample_id == "doc-5":
                features["taps"][2, 3] = float("inf")
            writer.add(Record(record.sample_id, record.input_ids, record.loss_mask, features))
    finish_store(tmp_path / "poisoned")
    return Store.open(tmp_path / "poisoned")


def test_a_non_finite_loss_stops_with_step_and_document_and_a_debug_record(tmp_path, target, poisoned):
    with pytest.raises(NonFiniteError) as error:
        train(
            section=section(),
            target=target,
            source=StoreSource(poisoned),
            run_dir=tmp_path / "run",
            options=options(
                max_steps=50, tokens_per_row=24, rows_per_step=2, save_every=1, keep_last=100, eval_share=0.0
            ),
            track=QUIET,
        )
    (path,) = (tmp_path / "run" / "debug").iterdir()
    report = json.loads(path.read_text())
    assert report["sample_ids"] == ["doc-5"]  # of two forwards, only the one with the infinity
    assert report["first_tensor"] == "loss"
    assert f"step {report['step']}: loss is not finite (documents: doc-5)" in str(error.value)
    # Every checkpoint before it is there, and none after it.
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert len(saved) == report["step"]
    assert saved == [f"step-{step:08d}" for step in range(1, report["step"] + 1)]


def record(numerators: tuple[float, ...], norms: list[float]) -> StepRecord:
    forwards = [MicroBatchRecord([[f"doc-{i}"]], torch.tensor(value)) for i, value in enumerate(numerators)]
    norm = torch.tensor(norms)
    update = Update(norm, norm.norm(), norm.isfinite().all())
    return StepRecord(3, 0.1, update, torch.tensor(0.0), forwards)


def test_the_first_non_finite_tensor_is_named_in_causal_order():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    names = [name for name, _ in module.named_parameters()]
    nan, inf = float("nan"), float("inf")

    def first(numerators, norms=(1.0, 1.0, 1.0, 1.0)):
        return find_non_finite(module, names, record(numerators, list(norms)), rank=0)

    assert first((1.0,)).first_tensor == "a loss of another process"
    report = first((1.0, 2.0), (1.0, 0.0, nan, inf))
    assert (report.first_tensor, report.sample_ids) == ("gradient of 1.weight", ["doc-0", "doc-1"])
    report = first((1.0, inf), (nan, nan, nan, nan))
    assert (report.first_tensor, report.sample_ids) == ("loss", ["doc-1"])
    with torch.no_grad():
        module[0].bias[1] = float("inf")
    assert first((1.0, inf)).first_tensor == "weight 0.bias"


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_outcomes_come_in_order_after_their_lag_and_none_is_lost(lag):
    verdicts = Verdicts(torch.device("cpu"), lag)
    seen = []
    for step in range(5):
        update = Update(torch.zeros(1), torch.zeros(()), torch.tensor(step != 2))
        verdicts.add(StepRecord(step, 0.1, update, torch.tensor(float(step == 3)), []))
        taken = verdicts.take()
        seen += taken
        assert len(seen) == max(0, step + 1 - lag)
    seen += verdicts.take(all_of_them=True)
    assert [verdict.record.step for verdict in seen] == list(range(5))
    assert [verdict.finite for verdict in seen] == [True, True, False, True, True]
    assert [verdict.stopping for verdict in seen] == [False, False, False, True, False]


def poisoned_run(target, poisoned, run_dir, lag, monkeypatch, **fields):
    """Trains on the store with one infinite document, as a GPU does where lag is 1: the outcome is read a step late."""
    monkeypatch.setattr(loop_module, "_lag", lambda device: lag)
    return train(
        section=section(),
        target=target,
        source=StoreSource(poisoned),
        run_dir=run_dir,
        options=options(
            **{
                "max_steps": 12,
                "tokens_per_row": 24,
                "rows_per_step": 2,
                "save_every": 1,
                "keep_last": 100,
                "eval_share": 0.0,
                **fields,
            }
        ),
        track=QUIET,
    )


def steps_in(run_dir):
    return {c.position.step: c for c in RunCheckpoints(run_dir / "checkpoints").all()}


@pytest.mark.parametrize("lag", [0, 1])
def test_a_skipped_step_changes_nothing_and_is_counted(tmp_path, target, poisoned, lag, monkeypatch):
    run_dir = tmp_path / "run"
    poisoned_run(target, poisoned, run_dir, lag, monkeypatch, skip_nonfinite=True)
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    reports = [json.loads(path.read_text()) for path in sorted((run_dir / "debug").iterdir())]
    assert len(reports) == 3  # 8 rows are 4 steps an epoch, 12 steps are 3 epochs
    assert all("doc-5" in report["sample_ids"] for report in reports)
    saved = steps_in(run_dir)
    skipped = [report["step"] for report in reports]
    for step in range(1, 12):
        before, after = saved[step].weights(), saved[step + 1].weights()
        changed = any(not torch.equal(before[name], after[name]) for name in before)
        assert changed == (step not in skipped), step
    counts = [entry["skipped"] for entry in entries]
    assert counts[-1] == 3
    assert counts == sorted(counts)
    # The averages of a step that was left out are of nothing, and the optimiser has not counted it.
    by_step = {entry["step"]: entry for entry in entries}
    assert all(by_step[step + 1]["loss"] is None for step in skipped)
    optimizer = saved[12].state()["optimizer"]
    assert {float(value) for name, value in optimizer.items() if name.startswith("step.")} == {12.0 - 3}
    assert all(value.isfinite().all() for value in optimizer.values())


def test_the_lag_changes_nothing_but_when_the_host_knows(tmp_path, target, poisoned, monkeypatch):
    for lag in (0, 1):
        poisoned_run(target, poisoned, tmp_path / str(lag), lag, monkeypatch, skip_nonfinite=True)
    weights = [steps_in(tmp_path / str(lag))[12].weights() for lag in (0, 1)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_step_read_late_still_stops_before_any_checkpoint_of_it(tmp_path, target, poisoned, monkeypatch):
    track = QUIET.model_copy(update={"every": 50})
    monkeypatch.setattr("tests.training.test_guards.QUIET", track)
    with pytest.raises(NonFiniteError) as error:
        poisoned_run(target, poisoned, tmp_path / "run", 1, monkeypatch, save_every=3, max_steps=40)
    (path,) = (tmp_path / "run" / "debug").iterdir()
    report = json.loads(path.read_text())
    assert report["first_tensor"] == "loss"
    assert "doc-5" in report["sample_ids"]
    assert f"step {report['step']}: loss is not finite" in str(error.value)
    assert all(step <= report["step"] for step in steps_in(tmp_path / "run"))
