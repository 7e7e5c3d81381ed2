from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.algorithms.registry import DraftSectionUnion, algorithm, algorithm_for, all_algorithms
from draftsmith.algorithms.weighting import DecayWeighting, DPaceWeighting
from draftsmith.errors import DraftsmithError
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

SECTIONS: TypeAdapter[Any] = TypeAdapter(DraftSectionUnion)


@pytest.mark.parametrize("method", all_algorithms(), ids=lambda method: method.name)
def test_every_method_is_complete(method: Algorithm) -> None:
    assert algorithm(method.name) is method
    assert method.summary
    assert method.paper
    section = SECTIONS.validate_python({"algorithm": method.name})
    assert type(section) is method.section
    decoder = algorithm(method.architecture)  # decoding finds a method by the architecture alone
    assert decoder.architecture == decoder.name == method.architecture


def test_dta_is_dflash_but_for_its_training_blocks() -> None:
    config = tiny_draft(tiny_target()).config
    dta, dflash = algorithm("dta"), algorithm("dflash")
    assert algorithm_for(config) is dflash
    assert dta.architecture == config.architecture
    assert dta.block_layout(config) == dflash.block_layout(config)
    assert dta.capture(config) == dflash.capture(config)


def test_an_unknown_method_is_named_with_the_nearest() -> None:
    with pytest.raises(DraftsmithError, match=r"unknown algorithm 'dflsh'; known: dflash, .*did you mean 'dflash'"):
        algorithm("dflsh")
    with pytest.raises(ValidationError, match=r"unknown algorithm 'dflsh'.*did you mean 'dflash'"):
        SECTIONS.validate_python({"algorithm": "dflsh"})
    with pytest.raises(ValidationError, match="unknown algorithm"):
        SECTIONS.validate_python({"algorithm": ["dflash"]})
    with pytest.raises(ValidationError, match="algorithm"):
        SECTIONS.validate_python({})


@pytest.mark.parametrize(
    "section",
    [
        {"algorithm": "dflash", "visible_base": 0.9},  # DTA's
        {"algorithm": "dflash", "gru_hidden_dim": 8},
        {"algorithm": "dflash", "objective": {"weighting": {"kind": "uniform", "gamma": 7.0}}},
        {"algorithm": "dflash", "objective": {"weighting": {"kind": "decay", "alpha": 0.5}}},
        {"algorithm": "dflash", "objective": {"weighting": {"kind": "dpace", "gamma": 7.0}}},
        {"algorithm": "dflash", "objective": {"weighting": {"kind": "dpace", "alpha": 0.0}}},
        {"algorithm": "dflash", "objective": {"weighting": {"kind": "dpace", "variant": "half"}}},
        {"algorithm": "dflash", "objective": {"weighting": {"kind": "decay", "gamma": 0.0}}},
        {"algorithm": "dflash", "objective": {"weighting": {"gamma": 7.0}}},
        {"algorithm": "dflash", "objective": {"head_chunk": 0}},
        {"algorithm": "dta", "visible_base": 0.0},
    ],
)
def test_an_option_that_the_method_does_not_use_is_an_error(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SECTIONS.validate_python(section)


def test_defaults_are_the_published_ones() -> None:
    assert SECTIONS.validate_python({"algorithm": "dflash"}).objective.weighting == DecayWeighting(gamma=7.0)
    weighting = {"kind": "dpace"}
    section = SECTIONS.validate_python({"algorithm": "dta", "objective": {"weighting": weighting}})
    assert section.objective.weighting == DPaceWeighting(alpha=0.5, variant="full")
    assert section.visible_base == 0.9


def test_the_section_has_a_json_schema() -> None:
    schema = SECTIONS.json_schema()
    assert set(schema["discriminator"]["mapping"]) == {method.name for method in all_algorithms()}
