"""A method from outside the package trains through the package: its own network, vocabulary and examples, no blocks."""

import json

import pytest
import torch

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import all_algorithms
from draftsmith.algorithms.trainee import Computation, Draw
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.features.identity import Provenance
from draftsmith.features.packing import collate
from draftsmith.features.record import Record
from draftsmith.features.schema import TAPS
from draftsmith.run.recipe import parse_recipe
from draftsmith.training.forward import DraftLoss, share_done
from draftsmith.training.graphs import BatchGraphs
from draftsmith.training.micro_batch import BatchMaker
from draftsmith.training.plan import Forward
from draftsmith.training.record import find_checkpoint, load_run
from draftsmith.training.run import train
from draftsmith.training.slots import Slots, pack
from draftsmith.training.source import SourceCorpus, StoreSource
from tests.support.toy_recurrent import ChainMaker, ToyNetwork, ToyRecurrent, ToySection, registered
from tests.training.counting import QUIET, SYMBOLS, TAP_IDS, counting_store, counting_target, identity_of, options
from tests.training.recording import graphs_on_the_cpu

STEPS, SHIFT = 3, 3
LEARNING = options(max_steps=60, rows_per_step=4, rows_per_forward=2, lr=2e-2, eval_every=30, data_workers=1)


@pytest.fixture(autouse=True)
def _registered():
    known = all_algorithms()
    with registered():
        yield
    assert all_algorithms() == known


@pytest.fixture(scope="module")
def target():
    return counting_target()


@pytest.fixture(scope="module")
def store(tmp_path_factory, target):
    """Of the symbols 3 to 18, so that the tokens of a fresh vocabulary, the lowest ids, are not those."""
    return counting_store(tmp_path_factory.mktemp("features"), target, shift=SHIFT)


def section(**fields) -> ToySection:
    """As a recipe says it."""
    base = {"num_hidden_layers": 1, "target_layer_ids": list(TAP_IDS), "dtype": "float32", "steps": STEPS}
    draft = {"algorithm": "toy_recurrent", "draft_vocab_size": SYMBOLS, **base, **fields}
    return parse_recipe({"run": "r", "target": {"path": "t"}, "draft": draft}).draft


def run(target, store, run_dir, train_options=LEARNING, **arguments):
    provenance = Provenance(identity_of(target), None)
    return train(
        section(), target, StoreSource(store), run_dir, train_options, QUIET, provenance=provenance, **arguments
    )


def logged(run_dir, kind):
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    of_the_machine = ("tokens_per_second", "data_wait", "memory_gib")
    return [{k: v for k, v in e.items() if k not in of_the_machine} for e in entries if e["kind"] == kind]


def test_the_counting_language_is_learnt_to_the_last_token(target, store, tmp_path):
    result = run(target, store, tmp_path / "run")
    evaluations = logged(tmp_path / "run", "eval")
    assert evaluations[0]["accept_length"] < 1.5
    assert evaluations[-1]["accuracy"] == [1.0] * STEPS
    assert result.evaluation["accept_length"] == 1.0 + STEPS
    assert result.best_step == 60

    draft = load_run(tmp_path / "run")
    assert isinstance(draft.backbone, ToyNetwork)
    assert draft.config.block is None
    assert {name.split(".")[0] for name in draft.state_dict()} == {"backbone", "vocabulary"}
    assert draft.vocabulary.draft_ids.tolist() == list(range(SHIFT, SHIFT + SYMBOLS))


def test_a_resumed_run_is_the_same_run(target, store, tmp_path):
    chosen = LEARNING.model_copy(update={"max_steps": 9, "eval_every": 4, "save_every": 5, "keep_last": 2})
    run(target, store, tmp_path / "straight", chosen)
    run(target, store, tmp_path / "resumed", chosen)
    last = find_checkpoint(tmp_path / "resumed", "last").directory
    last.rename(last.with_suffix(".gone"))
    assert run(target, store, tmp_path / "resumed", chosen, resume=True).step == 9
    straight, resumed = (find_checkpoint(tmp_path / name, "last").weights() for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    for kind in ("train", "eval"):
        assert logged(tmp_path / "straight", kind) == logged(tmp_path / "resumed", kind)


def test_without_its_tokens_the_draft_learns_nothing(target, store, tmp_path, monkeypatch):
    """Mutated: the vocabulary stays that of the lowest ids, three of which never come."""
    monkeypatch.setattr("tests.support.toy_recurrent.ToyRecurrent.initialise", lambda *_: None)
    result = run(target, store, tmp_path / "run")
    assert result.evaluation["accept_length"] < 1.0 + STEPS - 0.3


def test_chains_end_with_their_document_and_its_supervision():
    generator = torch.Generator().manual_seed(0)
    masks = [[1, 1, 1, 0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    documents = [
        Record(str(i), torch.randint(90, (len(m),), generator=generator), torch.tensor(m, dtype=torch.bool), {})
        for i, m in enumerate(masks)
    ]
    packed = collate([documents[:2], documents[2:]], 13)
    chains = ChainMaker(STEPS, 1.0).examples(packed, Draw(0, 0, 1))
    for row, (starts, members) in enumerate([((0, 7), documents[:2]), ((0,), documents[2:])]):
        wanted = torch.zeros(13, STEPS, dtype=torch.bool)
        for start, document in zip(starts, members, strict=True):
            ids, mask = document.input_ids.tolist(), document.loss_mask.tolist()
            for t in range(len(ids)):
                for k in range(STEPS):
                    if t + 2 + k >= len(ids) or not mask[t + 2 + k]:
                        break
                    wanted[start + t, k] = True
                    assert chains.tokens[row, start + t, k] == ids[t + 1 + k]
                    assert chains.labels[row, start + t, k] == ids[t + 2 + k]
        assert torch.equal(chains.mask[row], wanted)


def test_examples_of_any_kind_fit_the_readers_slots(store):
    made = BatchMaker(StoreSource(store), ChainMaker(STEPS, 1.0), 47, 1, seed=0)
    size = made.largest_micro_batch(2)
    slot = Slots(1, size, shared=False).slot(0)
    batch = made.micro_batch(Forward([[0, 1], [2, 3]]), 0, slot)
    packed = pack(batch, 0, slot)
    assert size / 2 < packed.used <= size
    assert TAPS in batch.packed.features


def test_a_corpus_counts_what_is_supervised(store):
    counts = SourceCorpus(StoreSource(store), [3, 8]).supervised_counts(19)
    wanted = torch.zeros(19, dtype=torch.int64)
    for document in (3, 8):
        for token, supervised in zip(store[document].input_ids, store[document].loss_mask, strict=True):
            wanted[token] += supervised
    assert torch.equal(counts, wanted)


def test_what_the_method_does_not_have_is_refused(target, store, tmp_path):
    with pytest.raises(DraftsmithError, match=r"toy_recurrent has no attention"):
        run(target, store, tmp_path / "run", LEARNING.model_copy(update={"attention": "flex"}))
    masked = section(block_size=4, mask_token_id=0)
    with pytest.raises(DraftsmithError, match=r"block_size.*toy_recurrent"):
        train(masked, target, StoreSource(store), tmp_path / "run", LEARNING, QUIET)
    with pytest.raises(DraftsmithError, match=r"blocks of masked slots.*toy_recurrent"):
        Draft.from_config(draft_config(section(), target.info)).with_block_size(4)


def test_replayed_steps_are_the_eager_ones(target, store, monkeypatch):
    """As of any method: a recording of one batch serves another of its shape."""
    config = draft_config(section(), target.info)
    torch.manual_seed(0)
    draft = Draft.from_config(config)
    method = ToyRecurrent()
    trainee = method.trainee(draft, target.ends, section(), Computation(draft.device))
    loss = DraftLoss(draft, trainee, autocast=None)
    made = BatchMaker(StoreSource(store), method.examples(config, section()), 48, 1, seed=0)
    batches = [made.micro_batch(Forward([[number], [number + 4]]), 0) for number in range(3)]

    def gradients(way):
        found = []
        for batch in batches:
            numerator, _, _ = way(batch, share_done(0, 1, draft.device))
            found.append([numerator.detach().clone(), *(p.grad.clone() for p in draft.parameters())])
            draft.zero_grad()
        return found

    def eagerly(batch, progress):
        outcome = loss(batch, progress)
        outcome[0].backward()
        return outcome

    wanted = gradients(eagerly)
    recordings = graphs_on_the_cpu(monkeypatch)
    found = gradients(BatchGraphs(loss, list(draft.parameters())).run)
    assert len(recordings) == 1
    for one, other in zip(wanted, found, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(wanted[0][0], wanted[1][0])
