"""The engine on a device: lossless there too; a step that graphs hold, that waits for nobody, and whose rows do not
see each other."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from draftsmith.decoding.answer import Answer
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import Generation, generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.rng import Stream, row_seeds, uniform_pair
from draftsmith.decoding.sampling import SamplingBounds, SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.runner import DenseBlocks, FusedBlocks
from draftsmith.targets.target import Target
from tests.decoding.oracle import Oracle, decode_with
from tests.support.tiny import KINDS, tiny_model
from tests.support.tiny_draft import tiny_draft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [[5, 6, 7], [1], list(range(40, 63)), [9, 3, 3, 80, 2, 11, 13, 17]]
SAMPLINGS = [SamplingOptions(), SamplingOptions(0.9, top_p=0.95, top_k=40)]
MARKOV = {"markov_rank": 4, "enable_confidence_head": True, "confidence_head_with_markov": True}
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9, "attention_sinks": True},
    "dflash2": {
        "architecture": "dflash2",
        "head": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 5},
    },
    "domino": {
        "architecture": "domino",
        "head": {"gru_hidden_dim": 16, "emb_dim": 8, "pure_draft_prefix_len": 1, "shift_label": True},
    },
    "vanilla": {"architecture": "dspark", "head": {**MARKOV, "markov_head_type": "vanilla"}},
    "gated": {"architecture": "dspark", "head": {**MARKOV, "markov_head_type": "gated"}},
    "rnn": {"architecture": "dspark", "head": {**MARKOV, "markov_head_type": "rnn"}},
}


def models(
    kind: str = "qwen3", dtype: torch.dtype = torch.float32, method: str = "dflash", *, fuse: bool = True
) -> tuple[Target, Draft]:
    target = Target.from_model(tiny_model(kind, hidden_size=256, dtype=dtype, initializer_range=0.06).cuda())
    if fuse:
        target.fuse()
    draft = tiny_draft(target, num_layers=2, block_size=7, **{"head_dim": 64, **METHODS[method]})
    return target, draft.to(dtype).cuda()


def request(sampling: SamplingOptions, new: int = 40, prompts: list[list[int]] = PROMPTS, seed: int = 4) -> Request:
    return Request.of(prompts, max_new_tokens=new, sampling=sampling, seed=seed)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def test_noise_is_the_same_on_both_devices() -> None:
    seeds, positions = torch.tensor(row_seeds(1, 50))[:, None], torch.arange(400)
    here = uniform_pair(seeds, positions, Stream.TOKEN, 3)
    there = uniform_pair(seeds.cuda(), positions.cuda(), Stream.TOKEN, 3)
    for expected, found in zip(here, there, strict=True):
        assert torch.equal(expected, found.cpu())


# --- lossless ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "own modules"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_speculative_equals_plain(kind: str, sampling: SamplingOptions, fuse: bool) -> None:
    target, draft = models(kind, fuse=fuse)
    plain = tokens(Engine(target).decode(request(sampling)))
    assert tokens(Engine(target, draft).decode(request(sampling))) == plain
    oracle = Oracle(plain, 6, 97, lambda row, done: (row * 5 + done * 3) % 7)
    eager = Engine(target, draft, EngineOptions(graphs="off", steps_ahead=0))
    found = decode_with(eager, request(sampling), oracle)
    assert tokens(found) == plain
    assert max(length for result in found for length in result.accept_lengths) == 7


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_graphs_give_what_eager_steps_give(method: str, sampling: SamplingOptions) -> None:
    target, draft = models(method=method)
    expected = Engine(target, draft, EngineOptions(graphs="off")).decode(request(sampling))
    engine = Engine(target, draft, EngineOptions(graphs="on"))
    assert engine.decode(request(sampling)) == expected
    assert len(engine.runner.step_graphs or ()) == 1
    assert engine.decode(request(sampling)) == expected  # the same graphs again
    if sampling.greedy:
        assert tokens(expected) == tokens(Engine(target).decode(request(sampling)))


def test_bfloat16_equals_plain_at_the_verify_width() -> None:
    target, draft = models(dtype=torch.bfloat16)
    plain = generate(target, None, PROMPTS, max_new_tokens=60, options=EngineOptions(verify_width=7))
    assert tokens(generate(target, draft, PROMPTS, max_new_tokens=60)) == tokens(plain)
    eager = EngineOptions(graphs="off", num_proposals=6)
    assert tokens(generate(target, draft, PROMPTS, max_new_tokens=60, options=eager)) == tokens(plain)


# --- steps and graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*METHODS, None], ids=[*METHODS, "plain"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_step_never_waits_for_the_device(method: str | None, sampling: SamplingOptions) -> None:
    target, draft = models(method=method or "dflash")
    engine = Engine(target, None if method is None else draft, EngineOptions(graphs="off"))
    engine.submit(request(sampling))
    engine.step()
    engine.step()
    assert engine.runner.pool is not None
    slots, bounds = engine.runner.pool.rows(0, 4), SamplingBounds.of([sampling])
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.runner.stepper.step(slots, engine.scheduler.shape.reserved, bounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_launching_and_reading_wait_for_nothing_but_reports() -> None:
    """The host's side of a step, prefill and admission included: only an event is waited for."""
    target, draft = models()
    engine = Engine(target, draft, EngineOptions(slots=2, max_length=100))
    for _ in range(2):  # warms up what allocates and compiles
        engine.decode(request(SAMPLINGS[0], 12, PROMPTS[:2]))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = engine.decode(request(SAMPLINGS[0], 12, PROMPTS[:2]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens(found) == tokens(Engine(target).decode(request(SAMPLINGS[0], 12, PROMPTS[:2])))


@pytest.mark.parametrize("max_graphs", [1, 8])
def test_many_shapes_share_a_bounded_number_of_graphs(max_graphs: int) -> None:
    target, draft = models()
    options = EngineOptions(context_bucket=16, max_graphs=max_graphs, batch_buckets=(1, 2), graphs="on")
    engine = Engine(target, draft, options)
    mixed = [answer for s, seed in ((0, 1), (1, 2)) for answer in engine.submit(request(SAMPLINGS[s], 150, seed=seed))]
    while not all(answer.finished for answer in mixed):
        engine.step()
    graphs = engine.runner.step_graphs
    assert graphs is not None
    assert 1 <= len(graphs) <= max_graphs
    assert max_graphs == 1 or len(graphs) > 2
    for half, (s, seed) in enumerate(((0, 1), (1, 2))):
        expected = Engine(target, draft, EngineOptions(graphs="off")).decode(request(SAMPLINGS[s], 150, seed=seed))
        assert [a.generation().token_ids for a in mixed[4 * half : 4 * half + 4]] == tokens(expected)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_the_hosts_lag_changes_nothing(sampling: SamplingOptions) -> None:
    target, draft = models()
    asked = request(sampling, 50)
    answer = Engine(target, draft, EngineOptions(steps_ahead=0)).decode(asked)
    for ahead in (1, 2, 5):
        assert Engine(target, draft, EngineOptions(steps_ahead=ahead)).decode(asked) == answer
    stop = [answer[0].token_ids[20], answer[2].token_ids[11]]
    stopping = Request.of(PROMPTS, max_new_tokens=50, sampling=sampling, seed=4, stop_token_ids=stop)
    expected = Engine(target, draft, EngineOptions(steps_ahead=0, graphs="off")).decode(stopping)
    assert any(result.finish_reason == "stop" for result in expected)
    assert Engine(target, draft, EngineOptions(steps_ahead=3)).decode(stopping) == expected


# --- rows -------------------------------------------------------------------------------------------------------------


def caches_of(engine: Engine, answer: Answer) -> torch.Tensor:
    assert engine.runner.pool is not None
    slot, state, cache = (
        engine.scheduler.occupants.index(answer),
        engine.runner.pool.state,
        engine.runner.pool.target_cache,
    )
    length = int(state.length[slot]) - 1
    parts = [t[slot, :, :length] for t in cache.tensors]
    parts += list(engine.runner.pool.draft.joint[:, :, slot, :, :length].flatten(0, 1))
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_row_is_the_same_to_the_last_bit_beside_any_neighbours(dtype: torch.dtype, sampling: SamplingOptions) -> None:
    """At a fixed number of slots, in any of them: its caches, and with them whatever comes of them."""
    target, draft = models(dtype=dtype)
    row, found, caches = request(sampling, 60, [[5, 3, 8, 1, 1, 4]], seed=9), [], []
    for neighbours in (0, 1, 3):
        options = EngineOptions(slots=4, max_length=128, prefill_rows=1, steps_ahead=0)
        engine = Engine(target, draft, options)
        for other in range(neighbours):
            engine.submit(request(SAMPLINGS[other % 2], 100, [PROMPTS[other]], seed=other))
        (answer,) = engine.submit(row)
        while len(answer.token_ids) < 20:
            engine.step()
        caches.append(caches_of(engine, answer))
        while not answer.finished:
            engine.step()
        found.append(answer.generation())
    assert found[0] == found[1] == found[2]
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0], caches[2])


def test_rows_take_turns() -> None:
    target, draft = models(dtype=torch.bfloat16)
    options = EngineOptions(slots=3, max_length=128, prefill_rows=1, prefill_chunk=8)
    engine = Engine(target, draft, options)
    asked = [request(SAMPLINGS[i % 2], 10 + 7 * i, [PROMPTS[i % 4]], seed=i) for i in range(10)]
    answers = [answer for one in asked for answer in engine.submit(one)]
    while not all(answer.finished for answer in answers):
        engine.step()
    alone = [Engine(target, draft, options).decode(one)[0] for one in asked]
    assert [answer.generation() for answer in answers] == alone


# --- the draft's fused pass -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_fused_blocks_equal_the_drafts_own_modules(method: str, dtype: torch.dtype) -> None:
    target, draft = models(dtype=dtype, method=method)
    block_size = draft.config.block.size
    taps = torch.randn(3, 80, 2 * target.hidden_size, device="cuda", dtype=dtype)
    more = torch.randn(3, block_size, 2 * target.hidden_size, device="cuda", dtype=dtype)
    start = torch.tensor([70, 3, 41], device="cuda")
    embeddings = torch.randn(3, block_size, target.hidden_size, device="cuda", dtype=dtype)
    results = []
    with torch.no_grad():
        for blocks in (DenseBlocks(draft), FusedBlocks(draft), DenseBlocks(deepcopy(draft).float())):
            cache = blocks.new_cache(3, 100)
            first, second, inputs = (tensor.to(cache.joint.dtype) for tensor in (taps, more, embeddings))
            blocks.append(first, torch.zeros_like(start), cache)
            blocks.append(second, start, cache)
            kept = cache.joint.clone()
            results.append((kept, blocks.block(inputs, start + 5, cache, 96)))
            changed = inputs.clone()
            changed[1, 2] += 1
            assert not torch.equal(results[-1][1][1], blocks.block(changed, start + 5, cache, 96)[1])
    for dense, fused, exact in zip(*results, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(fused, dense, atol=2e-4, rtol=2e-4)
        else:  # rounds no more than the modules do
            assert (fused - exact).norm() < 1.25 * (dense - exact).norm()
