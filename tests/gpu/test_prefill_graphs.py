"""Passes over prompts from graphs: what eager passes give, whatever the prompts, their groups and their slots."""

from functools import partial
from typing import Any

import pytest
import torch

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import Generation
from draftsmith.decoding.graphs import StepGraphs
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from tests.gpu.test_engine_step import SAMPLINGS, models, tokens
from tests.support.tiny import KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RAGGED = (3, 150, 64, 9, 201, 65, 31)


def request(sampling: SamplingOptions, seed: int = 0, new: int = 12) -> Request:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(96, (length,), generator=generator).tolist() for length in RAGGED]
    return Request.of(prompts, max_new_tokens=new, sampling=sampling, seed=4)


def replayed(engine: Engine, asked: Request) -> list[Generation]:
    """The answers once every pass comes from a graph."""
    for _ in range(2):  # the first passes are eager, the second are captured
        engine.decode(asked)
    before = engine.preparations
    found = engine.decode(asked)
    assert engine.preparations == before
    return found


def caches(engine: Engine) -> list[torch.Tensor]:
    """All that target and draft keep, what padding left in it too."""
    pool = engine.runner.pool
    assert pool is not None
    kept = [*pool.target_cache.tensors]
    return kept if pool.draft is None else [*kept, pool.draft.joint]


@pytest.mark.parametrize(
    ("drafted", "dtype", "sampling"),
    [
        (True, torch.bfloat16, SAMPLINGS[0]),
        (True, torch.float32, SAMPLINGS[1]),
        (False, torch.bfloat16, SAMPLINGS[1]),
    ],
    ids=["draft", "draft, sampled", "plain, sampled"],
)
@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 256},
        {"slots": 2, "max_length": 213},  # the padding of the longest prompt does not fit
        {"slots": 3, "max_length": 256, "prefill_chunk": 40},
        {"prefill_rows": 1, "max_length": 256},
    ],
    ids=str,
)
def test_replayed_passes_are_the_eager_ones(
    options: dict[str, Any], drafted: bool, dtype: torch.dtype, sampling: SamplingOptions
) -> None:
    """To the last bit: also with graphs off the widths are those of graphs."""
    target, draft = models(dtype=dtype)
    engine = Engine(target, draft if drafted else None, EngineOptions(**options))
    eager = Engine(target, draft if drafted else None, EngineOptions(**options, graphs="off"))
    found = replayed(engine, request(sampling))
    assert engine.runner.prompt_graphs
    assert found == replayed(eager, request(sampling))
    for here, there in zip(caches(engine), caches(eager), strict=True):
        assert torch.equal(here, there)
    other = request(sampling, seed=1)  # the same shapes, and so the same graphs
    before = engine.preparations
    changed = engine.decode(other)
    assert engine.preparations == before
    assert changed == eager.decode(other)
    assert tokens(changed) != tokens(found)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "own modules"])
@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_padding_changes_no_token(kind: str, fuse: bool) -> None:
    """In fp32, against prompts read a few tokens at a time, which are not padded."""
    target, draft = models(kind, fuse=fuse)
    found = replayed(Engine(target, draft), request(SAMPLINGS[0]))
    narrow = EngineOptions(prefill_chunk=3, prefill_rows=1, graphs="off")
    assert tokens(found) == tokens(Engine(target, None, narrow).decode(request(SAMPLINGS[0])))


def test_few_graphs_do_as_many_do() -> None:
    target, draft = models()
    asked = [request(SAMPLINGS[i % 2], seed=i) for i in range(4)]
    expected = [Engine(target, draft, EngineOptions(graphs="off", slots=3)).decode(one) for one in asked]
    for most in (1, 2, 32):
        engine = Engine(target, draft, EngineOptions(max_graphs=most, slots=3))
        for _ in range(2):
            assert [engine.decode(one) for one in asked] == expected
        assert engine.runner.prompt_graphs is not None
        assert len(engine.runner.prompt_graphs) <= most


def test_few_graphs_are_for_keys_that_come_again_soon() -> None:
    graphs, counts = StepGraphs(torch.device("cuda"), 2), torch.zeros(3, device="cuda")

    def step(key: int) -> None:
        counts[key].add_(1)

    def run(*keys: int) -> None:
        for key in keys:
            graphs.run(key, partial(step, key))

    run(*range(3), *range(3), *range(3))  # each is forgotten before it comes again
    assert (len(graphs), graphs.prepared) == (0, 2)
    run(0, 0, 0)
    assert (len(graphs), graphs.prepared) == (1, 3)
    run(1, 1, 2, 2, 0, 0)  # two graphs make room
    assert len(graphs) == 2
    assert counts.tolist() == [8, 5, 5]


def test_prompts_join_rows_in_work() -> None:
    """Passes from graphs between replayed steps, in slots that others have left."""
    target, draft = models(dtype=torch.bfloat16)
    options = EngineOptions(slots=3, max_length=320, prefill_rows=1)
    engine = Engine(target, draft, options)
    asked = [
        Request.of([prompt], max_new_tokens=5 + 2 * i, sampling=SAMPLINGS[i % 2], seed=i)
        for i, prompt in enumerate(request(SAMPLINGS[0]).prompts * 2)
    ]
    answers = [answer for one in asked for answer in engine.submit(one)]
    engine.step()
    engine.cancel(answers[1])
    while not all(answer.finished for answer in answers):
        engine.step()
    alone = Engine(target, draft, options.model_copy(update={"graphs": "off"}))
    for i in (0, *range(2, len(asked), 3)):
        assert answers[i].generation() == alone.decode(asked[i])[0]
