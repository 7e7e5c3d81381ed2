"""Drafts without a block of masked slots, and drafts with a vocabulary of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.drafts.checks import DraftConfigError
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft, DraftWeightsError, check_weights, file_name
from draftsmith.drafts.heads import HEADS, HeadConfig
from draftsmith.drafts.shapes import BlockShape, VocabularyShape
from draftsmith.drafts.vocabulary import DraftVocabulary
from draftsmith.errors import DraftsmithError
from draftsmith.targets.ends import TargetEnds
from tests.drafts.test_draft_config import fields


class _Chain(HeadConfig):
    architecture = "chain"
    needs_block = False
    own_vocabulary = True


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The fields of a draft that has no block and knows a part of the tokens."""
    monkeypatch.setitem(HEADS, "chain", _Chain)
    return fields(architecture="chain", block_size=..., mask_token_id=..., draft_vocab_size=40)


def test_flat_fields_make_the_parts_and_come_back_flat() -> None:
    config = DraftConfig(**fields())
    assert config.block == BlockShape(size=7, mask_token_id=96)
    assert config.vocabulary is None
    said = config.to_dict()
    assert (said["block_size"], said["mask_token_id"]) == (7, 96)
    assert not {"block", "vocabulary", "draft_vocab_size"} & set(said)
    assert DraftConfig(**fields(block_size=..., mask_token_id=..., block=config.block)) == config


def test_a_draft_without_a_block(chain: dict[str, Any]) -> None:
    config = DraftConfig(**chain)
    assert config.block is None
    assert config.vocabulary == VocabularyShape(size=40)
    assert not {"block_size", "mask_token_id"} & set(config.to_dict())
    assert config.to_dict()["draft_vocab_size"] == 40
    assert DraftConfig.parse(config.to_dict()) == config
    assert (config.flat()["block_size"], config.flat()["draft_vocab_size"]) == (None, 40)
    with pytest.raises(DraftConfigError, match=r"^tune needs a draft that fills blocks.*'chain' has no block"):
        config.block_for("tune")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": 4}, "mask_token_id is missing"),
        ({"mask_token_id": 4}, "block_size is missing"),
        ({"block_size": 4, "mask_token_id": 5}, "allowed for 'chain': neither"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; allowed: an integer >= 1"),
        ({"draft_vocab_size": True}, "draft_vocab_size is True"),
        ({"draft_vocab_size": 98}, "draft_vocab_size is 98; allowed: 1 to 97"),
        ({"block": BlockShape(size=4, mask_token_id=1), "block_size": 4}, "write it once"),
        ({"architecture": "dflash"}, "block_size is missing"),
        (
            {"architecture": "dflash", "block_size": 4, "mask_token_id": 1},
            "draft_vocab_size is 40; allowed for 'dflash'",
        ),
    ],
)
def test_parts_that_cannot_be_right(chain: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DraftConfigError) as raised:
        DraftConfig(**{**chain, **changes})
    assert said in str(raised.value)


def vocabulary(size: int, total: int, seed: int = 0) -> DraftVocabulary:
    generator = torch.Generator().manual_seed(seed)
    made = DraftVocabulary(size, 8, total)
    torch.nn.init.normal_(made.head_rows.weight, generator=generator)
    made.choose(torch.randperm(total, generator=generator)[:size])
    return made


@given(size=st.integers(1, 30), more=st.integers(0, 30), seed=st.integers(0, 99))
def test_places_and_ids_are_each_others_inverse(size: int, more: int, seed: int) -> None:
    own = vocabulary(size, size + more, seed)
    place, known = own.index(torch.arange(size + more))
    assert known.nonzero().flatten().tolist() == own.draft_ids.tolist()
    assert torch.equal(place[known], torch.arange(size))
    assert torch.equal(own.target_ids(place[known]), own.draft_ids)
    spread = own.spread(torch.arange(size) + 1.0)
    assert spread[own.draft_ids].tolist() == [i + 1.0 for i in range(size)]
    assert spread.sum() == size * (size + 1) / 2


@pytest.mark.parametrize(
    "ids", [[0, 1], [0, 1, 1], [0, 1, 9], [-1, 0, 1], [0, 1, 2, 3]], ids=["few", "repeated", "beyond", "below", "many"]
)
def test_other_ids_are_refused(ids: list[int]) -> None:
    own = vocabulary(3, 9)
    before = own.draft_ids.clone()
    with pytest.raises(DraftsmithError, match="allowed: 3 different ids"):
        own.choose(torch.tensor(ids))
    assert torch.equal(own.draft_ids, before)


def fresh(config: DraftConfig, ids: Tensor) -> Draft:
    draft = Draft.from_config(config, generator=torch.Generator().manual_seed(3))
    assert draft.vocabulary is not None
    draft.vocabulary.choose(ids)
    return draft


def test_logits_are_those_of_the_chosen_rows(chain: dict[str, Any]) -> None:
    """With the target's own rows, what the whole head says of these tokens; the argmax is one of them, by its id."""
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(1))[:40]
    draft = fresh(DraftConfig(**chain, output_multiplier=0.5, final_logit_softcapping=3.0), ids)
    head = torch.randn(97, 32, generator=torch.Generator().manual_seed(2))
    ends = TargetEnds(torch.randn(97, 32), head)
    assert draft.vocabulary is not None
    draft.vocabulary.head_rows.weight.data = head[draft.vocabulary.draft_ids]
    hidden = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(4))
    whole = torch.tanh((hidden @ head.T) * 0.5 / 3.0) * 3.0
    chosen = ids.sort().values
    torch.testing.assert_close(draft.logits(hidden, ends), whole[..., chosen])
    inside = torch.zeros(97, dtype=torch.bool).scatter(0, ids, True)
    wanted = whole.masked_fill(~inside, float("-inf")).argmax(-1)
    assert torch.equal(draft.argmax(hidden, ends), wanted)
    assert not torch.equal(wanted, whole.argmax(-1))


def test_equal_logits_go_to_the_lowest_id(chain: dict[str, Any]) -> None:
    draft = fresh(DraftConfig(**chain), torch.arange(96, 16, -2))
    assert draft.vocabulary is not None
    torch.nn.init.zeros_(draft.vocabulary.head_rows.weight)
    ends = TargetEnds(torch.randn(97, 32), torch.randn(97, 32))
    assert draft.argmax(torch.randn(4, 32), ends).tolist() == [18] * 4


def tensors_of(draft: Draft) -> dict[str, Tensor]:
    return {file_name(name): tensor for name, tensor in draft.state_dict().items()}


def test_ids_stay_integers_and_are_checked(chain: dict[str, Any], tmp_path: Path) -> None:
    draft = fresh(DraftConfig(**chain, dtype="float32"), torch.arange(50, 90))
    held = tensors_of(draft)
    assert held["draft_ids"].dtype == torch.int64
    assert held["head_rows.weight"].shape == (40, 32)
    check_weights(draft, held, "here")
    for wrong, said in (
        ({"draft_ids": torch.arange(50.0, 90.0)}, "wrong dtype: draft_ids is torch.float32; wanted torch.int64"),
        ({"draft_ids": torch.arange(90, 50, -1)}, "draft_ids repeats an id, or is not in ascending order"),
        ({"draft_ids": torch.arange(60, 100)}, "draft_ids runs from 60 to 99"),
    ):
        with pytest.raises(DraftWeightsError, match=said):
            check_weights(draft, {**held, **wrong}, "here")
