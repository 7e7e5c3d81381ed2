"""The target and draft of tests that need no others; a module may define its own."""

import pytest

from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("qwen3")


@pytest.fixture(scope="module")
def draft(target: Target) -> Draft:
    return tiny_draft(target, num_layers=2, block_size=7)
