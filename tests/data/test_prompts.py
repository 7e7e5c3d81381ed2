from collections import Counter

import pytest

from draftsmith.data.prompts import find_prompts, shipped_prompts
from draftsmith.errors import DraftsmithError


def test_shipped_prompts_are_enough_and_of_the_same_kinds() -> None:
    train, heldout = shipped_prompts("train"), shipped_prompts("heldout")
    assert len(train) >= 150
    assert len(heldout) >= 24
    kinds, heldout_kinds = Counter(p.category for p in train), Counter(p.category for p in heldout)
    assert kinds.keys() == heldout_kinds.keys()
    assert None not in kinds
    assert len(kinds) >= 8
    assert min(kinds.values()) >= 5


def test_shipped_splits_share_nothing() -> None:
    train, heldout = shipped_prompts("train"), shipped_prompts("heldout")
    prompts = [*train, *heldout]
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({tuple(turn.lower() for turn in prompt.turns) for prompt in prompts}) == len(prompts)


def test_a_name_that_is_neither_file_nor_data_set_is_told_what_there_is(tmp_path) -> None:
    for source in ("mt-bnch", str(tmp_path / "absent.jsonl")):
        with pytest.raises(
            DraftsmithError, match=r"no such file, nor prompts by that name; .*shipped, gsm8k, .*mt-bench"
        ):
            find_prompts(source, "heldout")


def test_the_default_split_is_for_training() -> None:
    assert shipped_prompts() == shipped_prompts("train")
