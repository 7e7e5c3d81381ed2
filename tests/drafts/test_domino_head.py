"""Domino's head: its configuration, its parameters, and its way through files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.algorithms.registry import algorithm
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.directory import read_directory
from draftsmith.drafts.draft import Draft, DraftWeightsError
from draftsmith.errors import DraftsmithError
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

HEAD = {"gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 1, "shift_label": True}
WITHOUT_DEFAULT = ("gru_hidden_dim", "emb_dim")


def domino(block_size: int = 5, **head: Any) -> Draft:
    fields = {name: value for name, value in {**HEAD, **head}.items() if value != "left out"}
    return tiny_draft(tiny_target(), architecture="domino", head=fields, block_size=block_size)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        *(({name: "left out"}, rf"{name} is missing; the draft's head needs it") for name in WITHOUT_DEFAULT),
        *(
            ({name: value}, rf"{name} is {value!r}; allowed: an integer >= 1")
            for name in WITHOUT_DEFAULT
            for value in (0, -4, 2.0, True, "8", None)
        ),
        *(
            ({"shift_label": value}, rf"shift_label is {value!r}; allowed: true or false")
            for value in (0, 1, "true", None)
        ),
        *(
            ({"pure_draft_prefix_len": value}, rf"pure_draft_prefix_len is {value!r}; allowed: an integer >= 0")
            for value in (-1, 1.0, False, None)
        ),
        ({"pure_draft_prefix_len": 5}, r"pure_draft_prefix_len is 5; allowed: 0 to 4.*shift_label True: 5 proposals"),
        (
            {"pure_draft_prefix_len": 4, "shift_label": False},
            r"pure_draft_prefix_len is 4; allowed: 0 to 3.*shift_label False: 4 proposals",
        ),
        ({"gru_hiden_dim": 3}, r"unknown field 'gru_hiden_dim'.*did you mean 'gru_hidden_dim'"),
        ({"markov_rank": 3}, r"unknown field 'markov_rank' in the draft's head"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(head: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        domino(**head)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("block_size", [2, 3, 7])
def test_every_prefix_that_the_layout_has_room_for_is_allowed(shift: bool, block_size: int) -> None:
    config = domino(block_size, shift_label=shift, pure_draft_prefix_len=0).config
    proposals = algorithm("domino").block_layout(config).max_proposals
    assert proposals == (block_size if shift else block_size - 1)
    for prefix in range(proposals):
        assert config.replace(head={**config.head.model_dump(), "pure_draft_prefix_len": prefix})
    with pytest.raises(DraftsmithError, match="pure_draft_prefix_len"):
        config.replace(head={**config.head.model_dump(), "pure_draft_prefix_len": proposals})


def test_fresh_weights_are_complete_and_have_the_files_names() -> None:
    config = domino().config
    draft = Draft.from_config(config)
    shapes = {name: list(p.shape) for name, p in draft.named_parameters() if name.startswith("head.")}
    hidden, vocabulary = config.hidden_size, config.vocab_size
    assert shapes == {
        "head.prefix_gru.weight_ih_l0": [30, hidden],
        "head.prefix_gru.weight_hh_l0": [30, 10],
        "head.embed_proj.0.weight": [6, hidden + 10],
        "head.embed_proj.2.weight": [vocabulary, 6],
    }
    assert all(p.isfinite().all() and p.std() > 0 for name, p in draft.named_parameters() if "head." in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_reading_one_by_one_equals_reading_at_once(dtype: torch.dtype) -> None:
    draft = domino().to(dtype)
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(3, 2, 9, draft.config.hidden_size, generator=generator).to(dtype)
    states = draft.head.prefix_states(embeddings)
    assert states.shape == (3, 2, 9, 10)
    state = draft.head.empty_prefix(embeddings[:, 0, 0])
    for token in range(9):
        state = draft.head.read(state, embeddings[:, 1, token])
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(state, states[:, 1, token], rtol=tolerance, atol=tolerance)
    changed = embeddings.clone()
    changed[:, :, 4] += 1
    same = (draft.head.prefix_states(changed) == states).all(-1)
    assert same[:, :, :4].all()
    assert not same[:, :, 4:].any()


@pytest.mark.parametrize("shift", [True, False])
def test_a_directory_holds_the_whole_head(tmp_path: Path, shift: bool) -> None:
    draft = domino(shift_label=shift, pure_draft_prefix_len=2)
    draft.save(tmp_path / "draft")
    written = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["dflash_config"]["projector_type"] == "domino"
    head = {**HEAD, "shift_label": shift, "pure_draft_prefix_len": 2}
    assert {name: written["dflash_config"][name] for name in head} == head
    assert written["emb_dim"] == 6
    loaded = Draft.load(tmp_path / "draft", strict=True)
    assert loaded.config == draft.config
    for (name, found), (_, saved) in zip(loaded.state_dict().items(), draft.state_dict().items(), strict=True):
        assert torch.equal(found, saved), name
    embeddings = torch.randn(1, 2, 3, draft.config.hidden_size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded.head.prefix_states(embeddings), draft.head.prefix_states(embeddings))


def respelt(directory: Path, change: Any) -> Path:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config, config["dflash_config"])
    file.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "change",
    [
        lambda top, nested: nested.update(projector_type="causal_v5"),
        lambda top, nested: nested.pop("emb_dim"),  # at top level only
        lambda top, nested: top.pop("emb_dim"),  # nested only
        lambda top, nested: (nested.pop("projector_type"), top.update(architectures=["DominoDraftModel"])),
        lambda top, nested: [top.update({name: nested.pop(name)}) for name in ("gru_hidden_dim", "shift_label")],
    ],
)
def test_other_spellings_mean_the_same(tmp_path: Path, change: Any) -> None:
    draft = domino()
    draft.save(tmp_path / "draft")
    assert Draft.load(respelt(tmp_path / "draft", change), strict=True).config == draft.config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda top, nested: top.update(emb_dim=7), r"dflash_config.emb_dim is 6 but emb_dim is 7"),
        (lambda top, nested: nested.update(projector_type="domnio"), r"projector_type is 'domnio'; allowed:.*'domino'"),
        (lambda top, nested: (top.pop("emb_dim"), nested.pop("emb_dim")), r"emb_dim is missing"),
        (lambda top, nested: nested.pop("gru_hidden_dim"), r"gru_hidden_dim is missing"),
        (lambda top, nested: nested.update(shift_label=1), r"shift_label is 1; allowed: true or false"),
        (lambda top, nested: nested.update(gru_hidden_dim=11), r"wrong shape: embed_proj.0.weight"),
        (lambda top, nested: nested.pop("projector_type"), r"gru_hidden_dim"),
    ],
)
def test_a_contradiction_is_an_error(tmp_path: Path, change: Any, message: str) -> None:
    domino().save(tmp_path / "draft")
    with pytest.raises(DraftsmithError, match=message):
        Draft.load(respelt(tmp_path / "draft", change), strict=True)


def test_a_head_without_one_of_its_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    domino().save(tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["prefix_gru.weight_hh_l0"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(DraftWeightsError, match=r"missing: prefix_gru.weight_hh_l0 \[30, 10\]"):
        Draft.load(tmp_path / "draft")


def test_what_readers_take_for_absent_fields(tmp_path: Path) -> None:
    domino().save(tmp_path / "draft")
    bare = respelt(
        tmp_path / "draft", lambda top, nested: [nested.pop(n) for n in ("shift_label", "pure_draft_prefix_len")]
    )
    config = DraftConfig.parse(read_directory(bare).config)
    assert (config.head.shift_label, config.head.pure_draft_prefix_len) == (False, 0)
