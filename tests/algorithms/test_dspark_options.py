"""DSpark's options: what the recipe, the head and the filler take, and what they refuse by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.dspark import DSparkObjectiveOptions, DSparkSection
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.weighting import DecayWeighting
from draftsmith.errors import DraftsmithError
from tests.algorithms.facts import llama
from tests.support.fillers import filler_of
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import dspark_head as head
from tests.support.tiny_draft import tiny_draft

METHOD = algorithm("dspark")
SMALL: dict[str, Any] = {"mask_token_id": 98, "block_size": 7, "num_hidden_layers": 2}


def test_defaults_are_the_published_ones() -> None:
    section = DSparkSection(**SMALL, markov_rank=256)
    options = section.objective
    assert (options.cross_entropy_weight, options.l1_weight) == (0.1, 0.9)
    assert options.weighting == DecayWeighting(gamma=4.0)
    config = draft_config(section, llama())
    assert config.head.model_dump() == head("vanilla", rank=256)
    assert METHOD.objective(config, section).confidence_weight == 1.0  # type: ignore[attr-defined]


def test_what_the_recipe_leaves_out_of_the_head_is_the_checkpoint_s() -> None:
    checkpoint = draft_config(DSparkSection(**SMALL, markov_rank=5, markov_head_type="rnn"), llama())
    assert draft_config(DSparkSection(init_from="x"), llama(), checkpoint).head == checkpoint.head
    changed = draft_config(DSparkSection(init_from="x", markov_head_type="gated"), llama(), checkpoint)
    assert changed.head.model_dump() == head("gated", rank=5)
    plain = draft_config(DSparkSection(**SMALL, markov_rank=5, enable_confidence_head=False), llama())
    section = DSparkSection(init_from="x", objective=DSparkObjectiveOptions(confidence_weight=0.5))
    with pytest.raises(DraftsmithError, match=r"confidence_weight is 0\.5, but the draft has no confidence head"):
        METHOD.objective(plain, section)


def test_a_rank_out_of_range_is_refused_by_the_section_and_by_the_configuration() -> None:
    with pytest.raises(ValidationError, match=r"markov_rank\s+Input should be greater than or equal to 0"):
        DSparkSection(**SMALL, markov_rank=-2)
    with pytest.raises(DraftsmithError, match="markov_rank is -2; allowed: an integer >= 0"):
        draft_config(DSparkSection(**SMALL, markov_rank=4), llama()).replace(head=head("vanilla", rank=-2))


def test_a_rank_of_zero_is_no_markov_head() -> None:
    config = draft_config(DSparkSection(**SMALL, markov_rank=0), llama())
    assert config.head.model_dump() == head("vanilla", with_markov=False, rank=0)
    with pytest.raises(DraftsmithError, match=r"no Markov embedding to read \(markov_rank is 0\)"):
        draft_config(DSparkSection(**SMALL, markov_rank=0, confidence_head_with_markov=True), llama())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"markov_rank": None}, ["markov_rank is missing"]),
        ({"markov_head_type": "lstm"}, ["markov_head_type is 'lstm'", "'vanilla', 'gated', 'rnn'"]),
        ({"markov_head_type": "gatd"}, ["markov_head_type is 'gatd'", "did you mean 'gated'"]),
        (
            {"enable_confidence_head": False, "confidence_head_with_markov": True},
            ["confidence_head_with_markov is True", "enable_confidence_head is False"],
        ),
    ],
)
def test_a_head_that_cannot_be_is_refused(fields: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(DraftsmithError) as error:
        draft_config(DSparkSection(**SMALL, **({"markov_rank": 4} | fields)), llama())
    assert all(part in str(error.value) for part in said), str(error.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"objective": {"weighting": {"kind": "dpace"}}}, "'dpace'.*allowed are 'uniform' and 'decay'"),
        ({"objective": {"cross_entropy_weight": 0, "l1_weight": 0}}, "both 0"),
        ({"objective": {"l1_weight": -1}}, "l1_weight"),
        ({"objective": {"confidence_weight": 0}}, "confidence_weight"),
        ({"objective": {"confidence_weight": 1}, "enable_confidence_head": False}, "no confidence head"),
        ({"emb_dim": 4}, "emb_dim"),
    ],
)
def test_options_that_make_no_sense_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DSparkSection(**fields)


@pytest.mark.parametrize(
    ("confidence", "decoding", "said"),
    [
        (True, {"min_survivl": 0.5}, "unknown field 'min_survivl'.*did you mean 'min_survival'"),
        (True, {"min_survival": 0.0}, "min_survival is 0.0; allowed: a finite number > 0"),
        (True, {"min_survival": 1.5}, "min_survival is 1.5"),
        (True, {"min_survival": True}, "min_survival is True"),
        (True, {"min_survival": "half"}, "min_survival is 'half'"),
        (False, {"min_survival": 0.5}, r"min_survival is 0\.5, but the draft has no confidence head"),
    ],
)
def test_decoding_options_are_checked(confidence: bool, decoding: dict[str, Any], said: str) -> None:
    target = tiny_target("llama", vocab_size=61)
    fields = head(confidence=confidence, with_markov=confidence)
    draft = tiny_draft(target, block_size=5, architecture="dspark", head=fields)
    with pytest.raises(DraftsmithError, match=said):
        filler_of(METHOD, draft, target.ends, **decoding)
    with pytest.raises(DraftsmithError, match="num_proposals is 6"):
        filler_of(METHOD, draft, target.ends, 6)
