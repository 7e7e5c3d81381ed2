"""DTA, and D-PACE for the drafts of plain DFlash, from capture to decoding in the counting language."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import generate
from draftsmith.decoding.request import Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target
from tests.families.counting import PROMPTS, assert_commits_maximum, train_counting

DPACE = [{"kind": "dpace", "variant": v} for v in ("full", "continuation_value")]


def check(target: Target, draft: Draft) -> None:
    assert algorithm_for(draft.config).name == "dflash"
    assert_commits_maximum(target, draft)
    assert_commits_maximum(target, draft, num_proposals=1)
    settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 2.5, "seed": 3}
    plain = generate(target, None, PROMPTS, **settings)
    drafted = generate(target, draft, PROMPTS, **settings)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    engine = Engine(target, draft)
    engine.drafter.filler = OneSlotOff(engine.drafter.filler)
    request = Request.of(PROMPTS, max_new_tokens=9, sampling=SamplingOptions(), seed=0)
    assert max(length for result in engine.decode(request) for length in result.accept_lengths) < 3


class OneSlotOff:
    """Mutated: reads the token of each slot off the slot before."""

    def __init__(self, filler: Any) -> None:
        self.filler, self.num_proposals = filler, filler.num_proposals

    def fill(self, hidden: Tensor, *others: Any) -> Any:
        return self.filler.fill(hidden.roll(1, dims=1), *others)


@pytest.mark.slow
@pytest.mark.parametrize("weighting", DPACE, ids=lambda weighting: weighting["variant"])
def test_dpace_commits_the_maximum(weighting: dict[str, Any]) -> None:
    check(*train_counting({"algorithm": "dflash", "objective": {"weighting": weighting}}, steps=160))


@cache
def trained_start() -> tuple[Target, Draft]:
    return train_counting({"algorithm": "dflash"})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"visible_base": 0.5, "objective": {"weighting": DPACE[0]}}], ids=str)
def test_dta_commits_the_maximum(tmp_path: Path, options: dict[str, Any]) -> None:
    """From a DFlash draft: DTA's own blocks show at least one token after the anchor, so they never train the first
    proposal of a block, which is DFlash's still."""
    target, start = trained_start()
    start.save(tmp_path / "start")
    section = {"algorithm": "dta", "init_from": str(tmp_path / "start"), **options}
    _, draft = train_counting(section, steps=40, lr=5e-4)
    assert not torch.equal(draft.backbone.fc.weight, start.backbone.fc.weight)
    check(target, draft)
