"""A method from outside the package decodes through the package: its own state, network and vocabulary, and neither
blocks nor mask token. Its output is the target's own; bench, tune and the export check take it as any other."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.algorithms.build import draft_config
from draftsmith.bench.anchors import anchored, proposals_at, replay
from draftsmith.bench.chat import Chat
from draftsmith.bench.decoders import DraftEntry
from draftsmith.bench.measure import bench
from draftsmith.bench.options import BenchOptions
from draftsmith.bench.page import render_page
from draftsmith.bench.tune import Shape, shapes, tune
from draftsmith.data.options import DataOptions
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.decoding.tuning import Tuning
from draftsmith.drafts.config import DraftConfigError
from draftsmith.errors import DraftsmithError
from draftsmith.export.verify import proposal_of
from draftsmith.stages.evaluate import by_generating
from draftsmith.targets.target import Target
from tests.bench.made import wordy_target
from tests.decoding.test_engine_graphs import Recorded
from tests.decoding.test_slots import requests, run
from tests.families.counting import PROMPTS, SYMBOLS, assert_commits_maximum, train_counting
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import scramble
from tests.support.toy_recurrent import ChainState, ToyDraft, ToyDrafter, ToySection, registered
from tests.test_losslessness import SAMPLINGS, SMALL, decode_small, p_value, small_models

STEPS = 4


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with registered():
        yield


def toy_draft(target: Target, *, steps: int = STEPS, vocabulary: int | None = None, seed: int = 0) -> ToyDraft:
    """A random draft with the last `vocabulary` of the target's tokens (None: half of them)."""
    size = vocabulary or target.info.vocab_size // 2
    section = ToySection(
        steps=steps, draft_vocab_size=size, num_hidden_layers=1, target_layer_ids=(1, 0), dtype="float32"
    )
    draft: ToyDraft = ToyDraft.from_config(draft_config(section, target.info))
    assert draft.vocabulary is not None
    scramble(draft, seed)
    draft.vocabulary.choose(torch.arange(target.info.vocab_size - size, target.info.vocab_size))
    return draft.eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("qwen3")


@pytest.fixture(scope="module")
def small() -> Target:
    """Of four tokens: a random draft is right now and then."""
    return tiny_target("qwen3", vocab_size=4, seed=7)


def prompts_of(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in (3, 1, 17, 8, 5)]


# --- learnt and decoded -----------------------------------------------------------------------------------------------


def test_what_it_learnt_of_the_counting_language_commits_the_maximum() -> None:
    section = {"algorithm": "toy_recurrent", "steps": 4, "draft_vocab_size": SYMBOLS}
    without = {"mask_token_id": None, "block_size": None, "intermediate_size": None}
    target, draft = train_counting({**section, **without}, steps=90, through_files=False)
    assert draft.config.block is None
    assert_commits_maximum(target, draft)
    assert_commits_maximum(target, draft, num_proposals=2)
    numbers = by_generating(target, PROMPTS, max_new_tokens=16)(draft)
    assert numbers == {"accept_length": 5.0, "tokens": 64.0}


# --- losslessness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_proposals": 1},
        {"slots": 2, "prefill_chunk": 3, "steps_ahead": 2},
        {"slots": 3, "prefill_rows": 1, "batch_buckets": (1, 2), "context_bucket": 8},
    ],
    ids=str,
)
def test_greedy_equals_plain_decoding(small: Target, options: dict[str, Any]) -> None:
    prompts = prompts_of(4)
    plain = generate(small, None, prompts, max_new_tokens=36, stop_token_ids=())
    draft = toy_draft(small, vocabulary=3)
    found = generate(small, draft, prompts, max_new_tokens=36, stop_token_ids=(), options=EngineOptions(**options))
    assert [row.token_ids for row in found] == [row.token_ids for row in plain]
    lengths = {length for row in found for length in row.accept_lengths}
    assert lengths == set(range(1, 2 + options.get("num_proposals", STEPS)))
    assert 0 in {token for row in found for token in row.token_ids}, "a token that the draft does not have"


def test_rows_come_go_and_are_cancelled(target: Target) -> None:
    draft = toy_draft(target)
    expected = [Engine(target, draft).decode(request)[0] for request in requests()]
    engine = Engine(target, draft, EngineOptions(slots=2, prefill_chunk=2, steps_ahead=1))
    answers = [answer for request in requests() for answer in engine.submit(request)]
    engine.step()
    engine.cancel(answers[1])
    kept = [i for i in range(7) if i != 1]
    assert run(engine, [answers[i] for i in kept]) == [expected[i] for i in kept]


def test_graphs_hold_its_steps(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = toy_draft(target)
    asked = requests()[:5]
    expected = [Engine(target, draft).decode(request)[0] for request in asked]
    recorded = Recorded(monkeypatch, target, draft, {"slots": 2, "max_length": 150, "steps_ahead": 1})
    for _ in range(2):
        assert [answer.generation() for answer in recorded.answers(asked)] == expected
    assert recorded.made > 1


def sampled(sampling: SamplingOptions, wrong_q: bool = False) -> list[Any]:
    target, _ = small_models()
    engine = Engine(target, toy_draft(target, steps=3, vocabulary=SMALL - 2, seed=2))
    if wrong_q:
        engine.drafter = Forgetful(engine.drafter)
    return decode_small(engine, sampling, new=4)


class Forgetful:
    """Mutated: says that its tokens were drawn from all that it has alike."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, *arguments: Any) -> Any:
        proposals = self.inner.propose(*arguments)
        return replace(proposals, q=(proposals.q > 0).float() / (SMALL - 2))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampled_output_has_the_targets_distribution(sampling: SamplingOptions) -> None:
    results = sampled(sampling)
    assert p_value(results, sampling) > 1e-3
    assert {length for result in results for length in result.accept_lengths} >= {1, 2}


def test_a_wrong_q_is_caught() -> None:
    assert p_value(sampled(SAMPLINGS[0], wrong_q=True), SAMPLINGS[0]) < 1e-6


# --- its state --------------------------------------------------------------------------------------------------------


def accept_lengths(target: Target, draft: ToyDraft) -> list[list[int]]:
    return [row.accept_lengths for row in generate(target, draft, prompts_of(4), max_new_tokens=30, stop_token_ids=())]


def test_a_chain_goes_on_from_the_last_token_that_stands(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed from acceptance at every anchor, each of which reads the text up to there afresh."""
    draft, prompts = toy_draft(small, vocabulary=3), prompts_of(4)
    plain = generate(small, None, prompts, max_new_tokens=30, stop_token_ids=())
    texts = [anchored(small, draft, p, row.token_ids) for p, row in zip(prompts, plain, strict=True)]
    found = accept_lengths(small, draft)
    assert [replay(text, STEPS) for text in texts] == found

    def keeps_all(self: ToyDrafter, state: ChainState, ids: Tensor, states: Any, start: Tensor, count: Tensor) -> None:
        self._take(state, states, torch.full_like(count, ids.shape[1]))

    monkeypatch.setattr(ToyDrafter, "update", keeps_all)
    assert accept_lengths(small, draft) != found, "mutated: rejected tokens count"


def test_any_chunks_and_padding_give_the_same_proposals(small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = toy_draft(small, vocabulary=3)
    text = torch.randint(4, (41,), generator=torch.Generator().manual_seed(8)).tolist()
    anchors = list(range(1, 41))
    wanted = proposals_at(small, draft, text, anchors)
    monkeypatch.setattr("draftsmith.bench.anchors.ROWS", 3)
    monkeypatch.setattr("draftsmith.bench.anchors.CHUNK", 2)
    found = proposals_at(small, draft, text, anchors)
    assert torch.equal(found.token_ids, wanted.token_ids)
    torch.testing.assert_close(found.chances, wanted.chances)
    assert (found.token_ids > 0).all(), "only tokens that it has"


# --- bench, tune, export and options ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wordy() -> Target:
    return wordy_target()


def test_bench_measures_it(wordy: Target) -> None:
    said = sorted(wordy.tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    draft = toy_draft(wordy, vocabulary=3)
    assert draft.vocabulary is not None
    draft.vocabulary.choose(torch.tensor(said))
    prompts = [Prompt("one", ("say one",)), Prompt("two", ("say two", "and the"))]
    options = BenchOptions(batch_size=(1, 2), max_new_tokens=11, shown=2, warmup=0)
    report = bench(wordy, [DraftEntry("toy", draft)], prompts, options, Chat(wordy.tokenizer, DataOptions()))
    (found,) = report.drafts
    assert (found.method, found.proposals, found.block_size) == ("toy_recurrent", STEPS, 0)
    answers = [one for size in (1, 2) for one in report.answers_of("toy", size)]
    assert all(one.equal_tokens == one.plain_tokens == len(one.token_ids) for one in answers)
    assert {length for one in answers for length in one.accept_lengths} > {1}
    ways = {token.came for text in report.shown for token in text.tokens}
    assert ways >= {"prefill", "accepted", "corrected"}
    assert "toy_recurrent" in render_page(report)


def test_tune_chooses_its_number_of_proposals(wordy: Target, tmp_path: Path) -> None:
    draft, said = toy_draft(wordy), list[str]()
    assert shapes(draft) == [Shape(None, count) for count in (4, 3, 2, 1)]
    found = tune(wordy, draft, [[40, 41, 42]], BenchOptions(max_new_tokens=6), say=said.append)
    assert said[0].startswith(f"1. {found.engine.num_proposals} proposals: ")
    found.write(tmp_path / "tuned.json")
    tuned, options = Tuning.read(tmp_path / "tuned.json").apply(draft)
    assert tuned is draft
    assert options.num_proposals == found.engine.num_proposals
    with pytest.raises(DraftsmithError, match="for a toy_recurrent draft, and this is a dflash draft with blocks of 4"):
        Tuning.read(tmp_path / "tuned.json").apply(small_models()[1])
    with pytest.raises(DraftConfigError, match="has no block"):
        tune(wordy, draft, [[40, 41, 42]], BenchOptions(max_new_tokens=6), block_sizes=[2])


def test_the_check_of_an_export_sees_all_of_it(target: Target) -> None:
    draft = toy_draft(target)
    before = proposal_of(draft, target.ends, 0)
    assert before.keys() == {"states", "choice 0", "choice 1", "choice 2", "choice 3", "proposals"}
    assert all(torch.equal(before[name], again) for name, again in proposal_of(draft, target.ends, 0).items())
    for name, parameter in draft.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.5).add_(0.1)
        after = proposal_of(draft, target.ends, 0)
        assert not all(torch.equal(before[key], after[key]) for key in before), name
        with torch.no_grad():
            parameter.copy_(kept)


def test_what_it_does_not_have_is_refused(target: Target) -> None:
    draft = toy_draft(target)
    with pytest.raises(DraftsmithError, match="num_proposals is 5; this draft proposes 1 to 4"):
        Engine(target, draft, EngineOptions(num_proposals=5))
    with pytest.raises(DraftsmithError, match=r"toy_recurrent has no decoding options of its own; remove speed=2"):
        Engine(target, draft, EngineOptions(proposer={"speed": 2}))
    with torch.no_grad():
        broken = toy_draft(target)
        broken.backbone.cell.bias_hh[3] = float("nan")
    asked = Request.of([[1, 2]], max_new_tokens=5, sampling=SamplingOptions(), seed=0)
    with pytest.raises(DraftsmithError, match=r"draft's hidden states are NaN or infinite for prompts \[0\]"):
        Engine(target, broken).decode(asked)
