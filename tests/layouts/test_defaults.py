"""What a draft's configuration leaves out has its default in every layout, on the way out and on the way in."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafts.config import FIELDS, DraftConfig
from draftsmith.drafts.directory import family, read_directory, write_directory
from draftsmith.drafts.draft import Draft, file_name
from draftsmith.drafts.fields import declared
from draftsmith.drafts.heads import HEADS
from draftsmith.layouts import WRITABLE, LayoutError
from draftsmith.layouts.consumers import MODEL_OPTIMIZER, SGLANG, SPECULATORS
from tests.layouts.drafts import HEADS as WHOLE_HEADS
from tests.layouts.drafts import simple_draft, target_ends

REFUSING = {"sglang": SGLANG, "modelopt": MODEL_OPTIMIZER, "speculators": SPECULATORS}


def least_head(architecture: str) -> dict[str, Any]:
    """A head's fields without those that have a default."""
    fields = HEADS[architecture].model_fields
    return {name: value for name, value in WHOLE_HEADS[architecture][0].items() if fields[name].is_required()}


def least(config: dict[str, Any]) -> dict[str, Any]:
    """A canonical configuration without the fields that have a default, which must be what it says."""
    kept = {name: value for name, value in config.items() if name == "head" or FIELDS[name].info.is_required()}
    return {**kept, "dtype": config["dtype"], "head": least_head(config["architecture"])}


@pytest.mark.parametrize("layout", WRITABLE)
@pytest.mark.parametrize("architecture", sorted(HEADS))
def test_every_default_survives_writing_and_reading(tmp_path: Path, architecture: str, layout: str) -> None:
    draft = simple_draft(architecture)
    draft = Draft.from_config(DraftConfig(**least(draft.config.to_dict())))
    refused = REFUSING[layout].faults(draft.config.to_dict(), family()) if layout in REFUSING else []
    if refused:
        with pytest.raises(LayoutError) as raised:
            draft.save(tmp_path / "draft", layout, target=target_ends())
        assert all(fault in str(raised.value) for fault in refused)
        return
    draft.save(tmp_path / "draft", layout, target=target_ends())
    again = DraftConfig.parse(read_directory(tmp_path / "draft").config)
    assert again.meaning() == draft.config.meaning()
    for name, field in FIELDS.items():
        if not field.info.is_required() and name not in ("dtype", "head", "causal"):
            assert again.flat()[name] == field.info.default, name
    for field in declared(HEADS[architecture].model_fields, HEADS[architecture]):
        if not field.info.is_required():
            assert getattr(again.head, field.name) == field.info.default, field.name


@pytest.mark.parametrize("layout", WRITABLE)
def test_a_head_that_says_the_least_is_refused_by_name_or_written(tmp_path: Path, layout: str) -> None:
    """A canonical configuration from elsewhere, whose head leaves out what has a default: this was a KeyError."""
    draft = simple_draft("domino", 1)
    config = {**draft.config.to_dict(), "head": {"gru_hidden_dim": 3, "emb_dim": 9}}
    tensors = {file_name(name): tensor for name, tensor in draft.state_dict().items()}
    if layout in ("sglang", "speculators"):
        said = "head.pure_draft_prefix_len is" if layout == "sglang" else "does not load 'domino'"
        with pytest.raises(LayoutError, match=said):
            write_directory(tmp_path / "draft", layout, config, tensors, target=target_ends())
        return
    write_directory(tmp_path / "draft", layout, config, tensors, target=target_ends())
    assert Draft.load(tmp_path / "draft").config.meaning() == draft.config.meaning()


@pytest.mark.parametrize("architecture", sorted(HEADS))
def test_every_field_with_a_default_may_be_left_out_of_files(tmp_path: Path, architecture: str) -> None:
    draft = Draft.from_config(DraftConfig(**least(simple_draft(architecture).config.to_dict())))
    draft.save(tmp_path / "draft")
    path = tmp_path / "draft/config.json"
    written = json.loads(path.read_text())
    optional = [name for name, field in FIELDS.items() if not field.info.is_required()]
    optional += [name for name, field in HEADS[architecture].model_fields.items() if not field.is_required()]
    for name in sorted(set(optional) - {"dtype", "head"}):
        bare = {key: value for key, value in written.items() if key != name}
        bare["dflash_config"] = {key: value for key, value in written["dflash_config"].items() if key != name}
        path.write_text(json.dumps(bare))
        if name in HEADS[architecture].model_fields or bare != written:
            assert Draft.load(tmp_path / "draft", strict=True).config.meaning() == draft.config.meaning(), name
