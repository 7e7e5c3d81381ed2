"""The engine on a device: lossless there too, and a step that neither waits for the host nor changes its shapes."""

import pytest
import torch

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import Generation, generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.rng import Stream, row_seeds, uniform_pair
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target
from tests.decoding.oracle import Oracle, decode_with
from tests.tiny import KINDS, tiny_model
from tests.tiny_draft import tiny_draft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [[5, 6, 7], [1], list(range(40, 63)), [9, 3, 3, 80, 2, 11, 13, 17]]
SAMPLINGS = [SamplingOptions(), SamplingOptions(0.9, top_p=0.95, top_k=40)]


def models(kind: str = "qwen3", dtype: torch.dtype = torch.float32) -> tuple[Target, Draft]:
    target = Target.from_model(tiny_model(kind, hidden_size=256, dtype=dtype, initializer_range=0.06).cuda())
    return target, tiny_draft(target, num_layers=2, block_size=7).to(dtype).cuda()


def request(sampling: SamplingOptions, new: int = 40) -> Request:
    return Request.of(PROMPTS, max_new_tokens=new, sampling=sampling, seed=4)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def test_noise_is_the_same_on_both_devices() -> None:
    seeds, positions = torch.tensor(row_seeds(1, 50))[:, None], torch.arange(400)
    here = uniform_pair(seeds, positions, Stream.TOKEN, 3)
    there = uniform_pair(seeds.cuda(), positions.cuda(), Stream.TOKEN, 3)
    for expected, found in zip(here, there, strict=True):
        assert torch.equal(expected, found.cpu())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_speculative_equals_plain(kind: str, sampling: SamplingOptions) -> None:
    target, draft = models(kind)
    plain = tokens(Engine(target).decode(request(sampling)))
    assert tokens(Engine(target, draft).decode(request(sampling))) == plain
    oracle = Oracle(plain, 6, 97, lambda row, done: (row * 5 + done * 3) % 7)
    assert tokens(decode_with(Engine(target, draft), request(sampling), oracle)) == plain


def test_bfloat16_equals_plain_at_the_verify_width() -> None:
    target, draft = models(dtype=torch.bfloat16)
    plain = generate(target, None, PROMPTS, max_new_tokens=60, options=EngineOptions(verify_width=7))
    assert tokens(generate(target, draft, PROMPTS, max_new_tokens=60)) == tokens(plain)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafted", [True, False])
def test_a_step_never_waits_for_the_device(sampling: SamplingOptions, drafted: bool) -> None:
    target, draft = models()
    engine = Engine(target, draft if drafted else None)
    decoding = engine.start(request(sampling))
    engine.step(decoding)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(decoding)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_graph_holds_a_step(kind: str, sampling: SamplingOptions) -> None:
    target, draft = models(kind)
    engine = Engine(target, draft, EngineOptions(context_bucket=1024))
    expected = engine.decode(request(sampling))
    decoding = engine.start(request(sampling))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        engine.step(decoding)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.step(decoding)
    while not engine.finished(decoding):
        graph.replay()
    assert engine.results(decoding) == expected
