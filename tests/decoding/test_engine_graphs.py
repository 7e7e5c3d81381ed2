"""Steps and passes over prompts from graphs, without a GPU: recorded on the CPU, and replayed as a graph would be."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.decoding import step
from draftsmith.decoding.answer import Answer
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.runner import ContextCache
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.targets.target import Target
from tests.decoding.test_slots import SAMPLINGS
from tests.training.recording import OnlyStream, Recording


def kept_by_drafter(state: Any) -> list[Tensor]:
    """The storage of a draft's state: of a context's cache, or the tensors that the state is made of."""
    if state is None:
        return []
    return [state.joint] if isinstance(state, ContextCache) else list(vars(state).values())


class _Graph(Recording):
    def reset(self) -> None:
        self.done = []


class Recorded:
    """An engine that works as on a GPU, with recordings for graphs; made: how many there were."""

    def __init__(
        self, patch: pytest.MonkeyPatch, target: Target, draft: Draft | None, options: dict[str, object]
    ) -> None:
        self.made = 0
        self.engine = Engine(target, draft, EngineOptions.model_validate(options))
        self.engine.scheduler.on_gpu = self.engine.scheduler.graphs = self.engine.runner.graphs = True
        replacements = {
            "CUDAGraph": _Graph,
            "graph": self._capture,
            "graph_pool_handle": lambda: None,
            "Stream": OnlyStream,
            "current_stream": OnlyStream,
            "stream": nullcontext,
            "synchronize": lambda *_: None,
        }
        for name, replacement in replacements.items():
            patch.setattr(torch.cuda, name, replacement)

    @contextmanager
    def _capture(self, graph: _Graph, **_: Any) -> Iterator[None]:
        """What a capture does not do, compute, is undone."""
        self.made += 1
        pool = self.engine.runner.pool
        assert pool is not None
        kept = [getattr(pool.state, field.name) for field in fields(pool.state)]
        kept += [*pool.target_cache.tensors]
        kept += kept_by_drafter(pool.draft)
        before = [tensor.clone() for tensor in kept]
        with graph:
            yield
        for tensor, old in zip(kept, before, strict=True):
            tensor.copy_(old)

    def answers(self, asked: list[Request], cancelled: int | None = None) -> list[Answer]:
        """Rows come two at a time; one is cancelled soon after it came."""
        found: list[Answer] = []
        while len(found) < len(asked) or not all(answer.finished for answer in found):
            for request in asked[len(found) : len(found) + 2]:
                found += self.engine.submit(request)
            self.engine.step()
            if cancelled is not None and cancelled < len(found):
                self.engine.cancel(found[cancelled])
        return found


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(9)
    lengths = (70, 1, 9, 130, 1, 64, 65, 20, 90)
    return [
        Request.of(
            [torch.randint(97, (length,), generator=generator).tolist()],
            max_new_tokens=(1, 6, 15)[i % 3],
            sampling=SAMPLINGS[(0, 0, 3)[i // 3]],
            stop_token_ids=torch.randint(97, (i % 4,), generator=generator).tolist(),
            seed=[i],
        )
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def expected(target: Target, draft: Draft) -> list[Generation]:
    return [Engine(target, draft).decode(request)[0] for request in requests()]


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 2, "max_length": 150, "prefill_chunk": 64, "steps_ahead": 1},
        {"slots": 3, "max_length": 150, "prefill_chunk": 40, "prefill_rows": 1, "batch_buckets": (1, 2)},
        {"slots": 2, "max_length": 150, "steps_ahead": 2, "max_graphs": 2},
    ],
    ids=str,
)
def test_replayed_steps_and_passes_answer_as_eager_ones(
    target: Target,
    draft: Draft,
    expected: list[Generation],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
) -> None:
    recorded = Recorded(monkeypatch, target, draft, options)
    for cancelled in (None, 3):
        found = recorded.answers(requests(), cancelled)
        for index, (answer, wanted) in enumerate(zip(found, expected, strict=True)):
            if index == cancelled and answer.finish_reason == "cancelled":
                assert answer.token_ids == wanted.token_ids[: len(answer.token_ids)]
            else:
                assert answer.generation() == wanted, (cancelled, index)
    assert recorded.made > 4
    assert recorded.engine.preparations[0] == 1  # one pool, used again


def test_steps_that_were_prepared_are_not_captured_again(
    target: Target, draft: Draft, expected: list[Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch, target, draft, {"batch_buckets": (1, 2), "context_bucket": 16})
    engine, greedy = recorded.engine, requests()[:6]
    engine.prepare(slots=3, max_length=150)
    graphs = engine.runner.step_graphs
    assert graphs is not None
    # Three sizes; 16, 32, 64 and 128 positions, and all that a slot has.
    assert len(graphs) == 3 * 5
    prepared = graphs.prepared
    for _ in range(2):
        assert [answer.generation() for answer in recorded.answers(greedy)] == expected[:6]
    assert (engine.runner.step_graphs, len(graphs), graphs.prepared) == (graphs, 15, prepared)
    drawn = requests()[7:]
    assert [answer.generation() for answer in recorded.answers(drawn)] == expected[7:]
    assert graphs.prepared > prepared, "drawn tokens take another step"


def test_a_pass_whose_place_the_host_froze_is_seen(
    target: Target, draft: Draft, expected: list[Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutated: a replayed pass reads the tokens that stood at the place of the captured one."""

    def frozen(state: DecodingState, width: int) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(width).expand(len(state.read), -1) + int(state.read[0])
        return state.tokens.gather(1, positions), positions, (state.length - state.read).clamp(max=width)

    monkeypatch.setattr(step, "read_prompt", frozen)
    options: dict[str, object] = {"slots": 1, "max_length": 150, "prefill_chunk": 8}
    recorded = Recorded(monkeypatch, target, draft, options)
    found = recorded.answers(requests()[:4])
    assert [answer.generation() for answer in found] != expected[:4]
