from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from draftsmith.algorithms.algorithm import Algorithm
from draftsmith.algorithms.dflash import DFlash, DFlashSection
from draftsmith.algorithms.registry import (
    DraftSectionUnion,
    algorithm,
    algorithm_for,
    all_algorithms,
    register,
    unregister,
)
from draftsmith.algorithms.section import with_head
from draftsmith.algorithms.weighting import DecayWeighting, DPaceWeighting
from draftsmith.drafts.checks import PositiveInt
from draftsmith.drafts.directory import family
from draftsmith.drafts.fields import Note
from draftsmith.drafts.heads import HEADS, HeadConfig
from draftsmith.errors import DraftsmithError
from draftsmith.run.recipe import Recipe, parse_recipe
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


# --- a method from outside the package --------------------------------------------------------------------------------


class OutsideHead(HeadConfig):
    architecture = "outside"

    width: Annotated[PositiveInt, Note("How wide it is.", recipe_default=3)]


@with_head(OutsideHead)
class OutsideSection(DFlashSection):
    algorithm: Literal["outside"] = "outside"  # type: ignore[assignment]


class Outside(DFlash):
    name = "outside"
    head = OutsideHead
    section: ClassVar[type[DFlashSection]] = OutsideSection


@pytest.fixture
def outside() -> Iterator[type[Outside]]:
    register(Outside)
    yield Outside
    unregister("outside")


def recipe(**draft: Any) -> dict[str, Any]:
    return {"run": "runs/x", "target": {"path": "somewhere"}, "draft": draft}


def test_a_method_from_outside_is_one_of_them(outside: type[Outside]) -> None:
    assert type(algorithm("outside")) is outside
    assert all_algorithms()[-1] is algorithm("outside")
    config = tiny_draft(tiny_target(), architecture="outside", head={"width": 5}).config
    assert algorithm_for(config) is algorithm("outside")
    assert config.head == OutsideHead(width=5)
    read = parse_recipe(recipe(algorithm="outside", width=7)).draft
    assert type(read) is OutsideSection
    assert algorithm("outside").head_config(read) == {"width": 7}
    assert algorithm("outside").head_config(parse_recipe(recipe(algorithm="outside")).draft) == {"width": 3}
    assert Recipe(**recipe(algorithm="outside", width=7)).model_dump()["draft"]["width"] == 7
    assert Recipe.model_json_schema()["$defs"]["OutsideSection"]["properties"]["width"]["minimum"] == 1
    for wrong, said in (
        ({"width": 0}, "draft.width is 0: input should be greater than or equal to 1"),
        ({"widht": 2}, "unknown key `widht` in section `draft`; did you mean `width`?"),
    ):
        with pytest.raises(DraftsmithError, match=said):
            parse_recipe(recipe(algorithm="outside", **wrong))
    register(outside)  # again: nothing happens


def test_a_draft_that_no_layout_spells_is_not_written(outside: type[Outside], tmp_path: Path) -> None:
    assert "outside" not in {member.architecture for member in family().members}
    with pytest.raises(DraftsmithError, match="no layout spells drafts of architecture 'outside'"):
        tiny_draft(tiny_target(), architecture="outside", head={"width": 5}).save(tmp_path / "draft")


def test_a_method_that_is_gone_is_not_known() -> None:
    assert "outside" not in HEADS
    with pytest.raises(DraftsmithError, match="unknown algorithm 'outside'"):
        parse_recipe(recipe(algorithm="outside"))


def test_two_methods_do_not_share_a_name() -> None:
    class Another(DFlash):
        pass

    with pytest.raises(DraftsmithError, match="method 'dflash' is DFlash; Another needs another name"):
        register(Another)
    assert type(algorithm("dflash")) is DFlash
