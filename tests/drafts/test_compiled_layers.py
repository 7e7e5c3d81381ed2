"""Compiled layers: one piece of code for any number of blocks."""

from types import SimpleNamespace

import pytest
import torch

from draftsmith.drafts import backbone
from tests.drafts.test_forward import Case
from tests.support.tiny_draft import scramble, tiny_draft

TARGET = SimpleNamespace(hidden_size=20, num_layers=5, vocab_size=61)


def test_layers_are_compiled_once_for_any_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def counting(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph.forward

    made = {}

    def compiled(function):  # type: ignore[no-untyped-def]
        if function not in made:
            made[function] = torch.compile(function, fullgraph=True, backend=counting)
        return made[function]

    monkeypatch.setattr(backbone, "compiled", compiled)
    torch._dynamo.reset()
    draft = tiny_draft(TARGET)
    scramble(draft, 1)
    cases = [Case(draft, blocks=blocks, seed=blocks) for blocks in (4, 7, 5)]
    wanted = [case.run() for case in cases]
    draft.backbone.fuse()
    for number, (case, plain) in enumerate(zip(cases, wanted, strict=True)):
        torch.testing.assert_close(case.run(), plain, atol=1e-5, rtol=1e-5)
        if number == 0:
            first = len(graphs)
    assert len(graphs) == first == 4  # context, before and after attention, the last norm
