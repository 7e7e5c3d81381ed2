"""What the engine can do, with every method: the output is plain decoding's, whatever is proposed and however much.

What each method proposes is compared with a plain reference in `tests/algorithms`, and the options of single methods
are tried there and in `tests/families`.
"""

from typing import Any

import pytest

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target
from tests.support.every_method import METHODS, draft_of
from tests.support.tiny import tiny_target

PROMPTS = [[0, 2, 1], [1], [2, 2, 0, 1, 1, 0, 4, 3], [3, 4], [1, 0, 2, 2]]
ASKED: dict[str, Any] = {"max_new_tokens": 11, "stop_token_ids": (3,)}
ENGINE: dict[str, Any] = {"slots": 3, "steps_ahead": 1, "prefill_chunk": 4}


@pytest.fixture(scope="module")
def target() -> Target:
    """Of five tokens: a random draft is right now and then."""
    return tiny_target("qwen3", vocab_size=5, num_layers=2, seed=5)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[Generation]:
    """Each prompt's plain answer, decoded alone."""
    return [generate(target, None, [prompt], **ASKED)[0] for prompt in PROMPTS]


def decode(target: Target, draft: Draft, **options: Any) -> list[Generation]:
    """In rows that wait for a slot and join while others go on; over prompts in chunks, and up to a stop token."""
    return generate(target, draft, PROMPTS, options=EngineOptions(**ENGINE, **options), **ASKED)


@pytest.mark.parametrize(
    ("block_size", "num_proposals"),
    [(6, None), (6, 2), (4, None)],
    ids=["all-proposals", "fewer-proposals", "smaller-blocks"],
)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_is_plain_decodings(
    target: Target, plain: list[Generation], method: str, block_size: int, num_proposals: int | None
) -> None:
    draft = draft_of(method, target, block_size=6, seed=1).with_block_size(block_size)
    drafted = decode(target, draft, num_proposals=num_proposals)
    assert [row.token_ids for row in drafted] == [row.token_ids for row in plain]
    assert [row.finish_reason for row in drafted] == [row.finish_reason for row in plain]
    assert {row.finish_reason for row in plain} == {"stop", "length"}
    layout = algorithm_for(draft.config).block_layout(draft.config)
    width = layout.verify_width(num_proposals or layout.max_proposals)
    assert 1 < max(length for row in drafted for length in row.accept_lengths) <= width


def test_another_draft_commits_other_lengths(target: Target) -> None:
    one, other = (decode(target, draft_of("dflash2", target, seed=seed)) for seed in (1, 2))
    assert [row.token_ids for row in one] == [row.token_ids for row in other]
    assert [row.accept_lengths for row in one] != [row.accept_lengths for row in other]
