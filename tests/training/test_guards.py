import json

import pytest
import torch

from draftsmith.features.manifest import StoreHeader
from draftsmith.features.reader import Store
from draftsmith.features.record import Record
from draftsmith.features.shards import StoreWriter, finish_store
from draftsmith.training.guards import MicroBatchRecord, NonFiniteError, find_non_finite
from draftsmith.training.run import train
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
            draft_section=section(),
            target=target,
            ends=target.ends,
            store=poisoned,
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


def forwards(*numerators: float) -> list[MicroBatchRecord]:
    return [MicroBatchRecord([[f"doc-{i}"]], torch.tensor(value)) for i, value in enumerate(numerators)]


def test_the_first_non_finite_tensor_is_named_in_causal_order():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def first(records):
        return find_non_finite(module, records, step=3, rank=0, learning_rate=0.1)

    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert first(forwards(1.0)).first_tensor == "a gradient of another process"
    module[1].weight.grad[0, 1] = float("nan")
    report = first(forwards(1.0, 2.0))
    assert (report.first_tensor, report.sample_ids) == ("gradient of 1.weight", ["doc-0", "doc-1"])
    report = first(forwards(1.0, float("inf")))
    assert (report.first_tensor, report.sample_ids) == ("loss", ["doc-1"])
    with torch.no_grad():
        module[0].bias[1] = float("inf")
    assert first(forwards(1.0, float("inf"))).first_tensor == "weight 0.bias"
