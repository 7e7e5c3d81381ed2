"""The table of a draft's fields: what follows from it is whole."""

from typing import Any

import pytest

from draftsmith.algorithms.registry import all_algorithms
from draftsmith.algorithms.section import DraftSection
from draftsmith.drafts.config import FIELDS, DraftConfig
from draftsmith.drafts.directory import family
from draftsmith.drafts.fields import Origin, Warm, declared
from draftsmith.drafts.heads import HEADS, HeadConfig, register_head
from draftsmith.errors import DraftsmithError
from tests.drafts.test_draft_config import fields


def test_every_field_has_a_note_that_says_something() -> None:
    assert list(FIELDS) == DraftConfig.known_fields()
    heads = [field for head in HEADS.values() for field in declared(head.model_fields, head)]
    for field in (*FIELDS.values(), *heads):
        assert field.note.about.endswith("."), field.name
        assert isinstance(field.note.warm, Warm) or len(field.note.warm) > 10, field.name


def test_a_field_without_a_note_is_noticed() -> None:
    class Silent(HeadConfig):
        width: int

    with pytest.raises(TypeError, match=r"Silent\.width has 0 notes"):
        list(declared(Silent.model_fields, Silent))


def test_the_sections_have_the_recipes_fields_and_their_heads() -> None:
    shared = {name for name, field in FIELDS.items() if field.note.origin is Origin.RECIPE}
    own = {"algorithm", "init_from", "num_taps", "rope_theta"}
    assert set(DraftSection.model_fields) == shared | own
    for method in all_algorithms():
        said = {"objective"} if method.name != "dta" else {"objective", "visible_base"}
        assert set(method.section.model_fields) == shared | own | said | set(method.head.model_fields)
        for name in (*shared, *method.head.model_fields):
            assert method.section.model_fields[name].description, name


@pytest.mark.parametrize("architecture", sorted(HEADS))
def test_consumers_name_fields_that_there_are(architecture: str) -> None:
    head = HEADS[architecture]
    known = {*FIELDS, *(f"head.{name}" for name in head.model_fields), "rope.partial_rotary_factor"}
    member = family().member(architecture)
    assert {name for table in member.spelling.served.values() for name in table} <= known
    assert set(member.spelling.repeated) <= set(head.model_fields)


def test_spellings_carry_the_defaults() -> None:
    spelt = {spelling.name: spelling for spelling in family().fields}
    assert spelt["output_multiplier"].default == 1.0
    assert spelt["final_logit_softcapping"].default is None
    assert spelt["hidden_size"].default is ...
    assert spelt["target_layer_ids"].place.speculators == "aux_hidden_state_layer_ids"


def test_two_heads_do_not_share_a_name() -> None:
    class Other(HeadConfig):
        architecture = "dflash"

    with pytest.raises(DraftsmithError, match="architecture 'dflash' is DFlashHeadConfig; Other needs another name"):
        register_head(Other)
    register_head(HEADS["dflash"])  # again: nothing happens


@pytest.mark.parametrize("architecture", sorted(HEADS))
def test_only_its_own_head_is_taken(architecture: str) -> None:
    complete: dict[str, dict[str, Any]] = {
        "dflash": {},
        "dflash2": {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 5},
        "domino": {"gru_hidden_dim": 3, "emb_dim": 4},
        "dspark": {
            "markov_rank": 3,
            "markov_head_type": "rnn",
            "enable_confidence_head": True,
            "confidence_head_with_markov": False,
        },
    }
    config = DraftConfig(**fields(architecture=architecture, head=complete[architecture]))
    assert type(config.head) is HEADS[architecture]
    assert HEADS[architecture].of(config) is config.head
    assert config.replace(head=config.head) == config
    for other in HEADS.keys() - {architecture}:
        with pytest.raises(DraftsmithError, match=f"is of architecture '{architecture}'; allowed here: '{other}'"):
            HEADS[other].of(config)
        with pytest.raises(DraftsmithError, match="head is a "):
            config.replace(architecture=other, head=config.head)


def test_what_a_head_leaves_out_is_said_with_its_default() -> None:
    config = DraftConfig(**fields(architecture="domino", head={"gru_hidden_dim": 3, "emb_dim": 4}))
    assert config.to_dict()["head"] == {
        "gru_hidden_dim": 3,
        "emb_dim": 4,
        "pure_draft_prefix_len": 0,
        "shift_label": False,
    }
