"""Recorded acceptance against the engine, and what is chosen from it."""

import json
import random

import pytest

from draftsmith import generate
from draftsmith.algorithms.registry import algorithm_for
from draftsmith.bench.anchors import Anchored, anchored, replay
from draftsmith.bench.decoders import RunningDecoder
from draftsmith.bench.options import BenchOptions
from draftsmith.bench.tune import Candidate, Shape, candidates, shapes, told, tune
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.tuning import Tuning
from draftsmith.errors import DraftsmithError
from tests.bench.made import wordy_target
from tests.support.tiny_draft import tiny_draft

PROMPTS = [[40, 41, 42], [50, 51, 52, 60, 7]]
HEADS = {
    "dflash": {},
    "dspark": {
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "domino": {"emb_dim": 8, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1, "shift_label": True},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3},
}
DRAFT_SEED = 2


@pytest.fixture(scope="module")
def target():
    return wordy_target()


@pytest.fixture(scope="module")
def scaling_target():
    """One that multiplies its embeddings, as its drafts do theirs."""
    return wordy_target("gemma3")


def draft_of(target, method, block_size=5, **fields):
    sizes = {"block_size": block_size, "head": HEADS[method], "num_layers": 1, "seed": DRAFT_SEED}
    return tiny_draft(target, architecture=method, **sizes | fields)


@pytest.mark.parametrize(("of", "seed"), [("target", DRAFT_SEED), ("scaling_target", 6)])
@pytest.mark.parametrize("method", HEADS)
def test_a_replay_commits_what_the_engine_commits(of, seed, method, request):
    target = request.getfixturevalue(of)
    draft = draft_of(target, method, seed=seed, input_embedding_scale=target.info.embedding_scale or 1.0)
    plain = generate(target, None, PROMPTS, max_new_tokens=20)
    texts = [anchored(target, draft, p, g.token_ids) for p, g in zip(PROMPTS, plain, strict=True)]
    assert max(max(text.accepted) for text in texts) >= 2
    for proposals in (1, 4):
        options = EngineOptions(num_proposals=proposals)
        decoded = generate(target, draft, PROMPTS, max_new_tokens=20, options=options)
        assert [replay(text, proposals) for text in texts] == [one.accept_lengths for one in decoded]


@pytest.mark.parametrize("method", HEADS)
def test_a_replay_of_a_smaller_block_is_the_engines(target, method):
    draft = draft_of(target, method, block_size=6).with_block_size(3)
    (plain,) = generate(target, None, PROMPTS[:1], max_new_tokens=20)
    (decoded,) = generate(target, draft, PROMPTS[:1], max_new_tokens=20)
    proposals = algorithm_for(draft.config).block_layout(draft.config).max_proposals
    assert replay(anchored(target, draft, PROMPTS[0], plain.token_ids), proposals) == decoded.accept_lengths
    assert decoded.token_ids == plain.token_ids


# --- the choice -------------------------------------------------------------------------------------------------------


def recorded(acceptance: float, seed: int, block: int = 16, tokens: int = 400) -> Anchored:
    """Acceptance at every anchor of a text each of whose tokens a draft foresees with this chance."""
    draw = random.Random(seed)
    foreseen = [draw.random() < acceptance for _ in range(tokens)]
    accepted = []
    for anchor in range(tokens):
        run = 0
        while run < block - 1 and anchor + 1 + run < tokens and foreseen[anchor + 1 + run]:
            run += 1
        accepted.append(run)
    return Anchored(tuple(accepted))


def costs() -> dict[Shape, float]:
    """A cycle has a fixed price and one a proposal, as where the target is bound by arithmetic."""
    return {Shape(size, size - 1): 0.010 + 0.0008 * size for size in (4, 8, 16)}


def best(acceptance: float) -> Shape:
    texts = {size: [recorded(acceptance, seed, size) for seed in range(4)] for size in (4, 8, 16)}
    return candidates(texts, costs())[0].shape


def test_long_blocks_lose_on_prose_and_win_on_structured_text():
    assert best(0.55) == Shape(4, 3)
    assert best(0.97) == Shape(16, 15)
    assert best(0.8).block_size == 8


def test_speeds_follow_from_lengths_and_costs():
    text = Anchored((2, 0, 1, 3, 0, 0, 0))
    assert replay(text, 3) == [3, 3]
    assert replay(text, 1) == [2, 2, 1, 1]
    found = candidates({4: [text]}, {Shape(4, 3): 0.5, Shape(4, 1): 0.25}, batch_size=2)
    speeds = {c.shape.num_proposals: c.tokens_per_second for c in found}
    # The last verify of a text is cut by its end, and does not count.
    assert speeds[3] == pytest.approx(2 * 3 / 0.5)
    assert speeds[1] == pytest.approx(2 * (5 / 3) / 0.25)
    assert [c.tokens_per_second for c in found] == sorted(speeds.values(), reverse=True)
    with pytest.raises(DraftsmithError, match="too short"):
        candidates({4: [Anchored((0,))]}, {Shape(4, 3): 0.5})


def test_the_whole_way_to_a_file_that_decoding_reads(target, tmp_path):
    draft = draft_of(target, "dspark", block_size=4)
    said = []
    engine = EngineOptions(context_bucket=64, proposer={"rollout": "plain"})
    options = BenchOptions(max_new_tokens=6, batch_size=2)
    found = tune(target, draft, PROMPTS, options, engine, block_sizes=[2], say=said.append)
    tried = {(c["block_size"], c["num_proposals"]) for c in found.found["candidates"]}
    assert tried == {(2, 2), (2, 1)}
    assert said[0].startswith(f"1. blocks of {found.block_size}, {found.engine.num_proposals} proposals")
    path = tmp_path / "tuned.json"
    found.write(path)
    # Measured with these, defaults included: what another recipe says of them does not count.
    base = EngineOptions(prefill_chunk=2, context_bucket=32, proposer={"min_survival": 0.0, "rollout": "pruned"})
    measured = engine.model_copy(update={"num_proposals": found.engine.num_proposals})
    assert EngineOptions(**json.loads(path.read_text())["engine"]) == measured
    tuned, options = Tuning.read(path).apply(draft, base)
    assert tuned.config.block.size == found.block_size
    assert options == measured.model_copy(update={"proposer": {"min_survival": 0.0, "rollout": "plain"}})
    tuned, options = Tuning.read(path).apply(draft)
    decoded = generate(target, tuned, PROMPTS, max_new_tokens=6, options=options)
    assert [g.token_ids for g in decoded] == [g.token_ids for g in generate(target, None, PROMPTS, max_new_tokens=6)]


def test_settings_of_another_draft_and_damaged_files(target, tmp_path):
    path = tmp_path / "tuned.json"
    Tuning(method="dflash", trained_block_size=7, block_size=4, engine=EngineOptions()).write(path)
    with pytest.raises(DraftsmithError, match=r"for a dflash draft with blocks of 7, .* blocks of 5"):
        Tuning.read(path).apply(draft_of(target, "dflash"))
    path.write_text('{"version": 1}')
    with pytest.raises(DraftsmithError, match=r"tuned\.json is not a file that `draftsmith tune` wrote"):
        Tuning.read(path)
    with pytest.raises(DraftsmithError, match=r"absent\.json cannot be read"):
        Tuning.read(tmp_path / "absent.json")


def test_cycles_are_timed_in_whole_batches_also_of_fewer_prompts(target, monkeypatch):
    asked = []
    timed = RunningDecoder.timed

    def noted(self, request):
        asked.append(len(request.prompts))
        return timed(self, request)

    monkeypatch.setattr(RunningDecoder, "timed", noted)
    options = BenchOptions(max_new_tokens=8, batch_size=3)
    tune(target, draft_of(target, "dflash"), PROMPTS, options, block_sizes=[2])
    assert asked[0] == len(PROMPTS)  # the answers, once
    assert set(asked[1:]) == {3}


def test_shapes_to_try(target):
    assert shapes(draft_of(target, "dflash", block_size=16))[:5] == [
        *(Shape(16, n) for n in (15, 11, 8, 4)),
        Shape(12, 11),
    ]
    with pytest.raises(DraftsmithError, match="block_size is 9, and the draft was trained with 5"):
        shapes(draft_of(target, "dflash"), [9])
    with pytest.raises(DraftsmithError, match=r"bench\.temperature"):
        tune(target, draft_of(target, "dflash"), PROMPTS, BenchOptions(temperature=1.0))
    with pytest.raises(DraftsmithError, match=r"bench\.max_new_tokens is 1"):
        tune(target, draft_of(target, "dflash"), PROMPTS, BenchOptions(max_new_tokens=1))
    trimming = EngineOptions(proposer={"min_survival": 0.2})
    with pytest.raises(DraftsmithError, match="min_survival, which leaves proposals out"):
        tune(target, draft_of(target, "dspark"), PROMPTS, BenchOptions(), trimming)


@pytest.mark.parametrize(("plain_speed", "slower"), [(90.0, False), (110.5, True)])
def test_it_is_said_when_every_choice_is_slower_than_plain_decoding(plain_speed, slower):
    ranked = [Candidate(Shape(6, 4), 2.0, 0.02, 100.0), Candidate(Shape(3, 2), 1.5, 0.02, 75.0)]
    lines = list(told(ranked, plain_speed))
    assert lines[0].startswith(f"1. blocks of 6, 4 proposals: 100.0 tokens/s ({100 / plain_speed:.2f} times plain)")
    assert any("none is as fast as plain decoding (110.5 tokens/s)" in line for line in lines) == slower
