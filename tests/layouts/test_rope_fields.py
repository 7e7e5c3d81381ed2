"""Rotary embeddings as files spell them: what several positions would share, and the number of channels that rotate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3Config

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.dflash import DFlashSection
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.rope import Rope, rotate
from draftsmith.errors import DraftsmithError
from draftsmith.layouts import LayoutError
from draftsmith.layouts.rope_fields import rope_parameters
from draftsmith.targets.info import TargetInfo
from tests.layouts.drafts import simple_draft, target_ends

HEAD_DIM = 12  # of `simple_draft`


def read(top: dict[str, Any], head_dim: Any = HEAD_DIM) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    return rope_parameters({"the top level": top}, head_dim, notes), notes


# --- several positions a token ----------------------------------------------------------------------------------------


def by_sections(
    states: Tensor, positions: Tensor, sections: list[int], interleaved: bool, config: DraftConfig
) -> Tensor:
    """Rotated by three positions a token, as multimodal models do: positions [3, tokens], states [tokens, d]. Channel
    pair i turns by the position that owns it: runs of `sections` pairs, or every third pair."""
    pairs = config.rotary_dim // 2
    if interleaved:
        owner = [0] * pairs
        for axis in (1, 2):
            for pair in range(axis, min(3 * sections[axis], pairs), 3):
                owner[pair] = axis
    else:
        owner = [axis for axis, size in enumerate(sections) for _ in range(size)]
    out = states.clone()
    for token in range(states.shape[0]):
        for pair in range(pairs):
            angle = float(positions[owner[pair], token]) / config.rope.theta ** (2 * pair / config.rotary_dim)
            sine, cosine = torch.tensor(angle).sin(), torch.tensor(angle).cos()
            a, b = states[token, pair], states[token, pair + pairs]
            out[token, pair], out[token, pair + pairs] = a * cosine - b * sine, b * cosine + a * sine
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_one_position_turns_all_sections_alike(tmp_path: Path, interleaved: bool, partial: float) -> None:
    """What is left out changes nothing: a draft's tokens have the same position three times. With other positions it
    would."""
    sections = [2, 2, 2] if partial == 1.0 else [1, 1, 1]
    spelt = {
        "rope_theta": 5000.0,
        "rope_type": "default",
        "partial_rotary_factor": partial,
        "mrope_section": sections,
        "mrope_interleaved": interleaved,
    }
    parameters, notes = read({"rope_parameters": spelt})
    assert parameters == {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": partial}
    assert len(notes) == 1
    assert "mrope_section, mrope_interleaved is left out" in notes[0]
    config = simple_draft("dflash", rope=parameters).config
    states = torch.randn(5, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 3, 4, 17, 90])
    rope = Rope(config)
    ours = rotate(states, *rope(positions))
    same = by_sections(states, positions.expand(3, -1), sections, interleaved, config)
    torch.testing.assert_close(ours, same, rtol=1e-4, atol=1e-4)
    other = by_sections(states, torch.stack((positions, positions + 1, positions)), sections, interleaved, config)
    assert not torch.allclose(ours, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize(
    "spelt",
    [
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "mrope_section": [2, 2, 2]}},
        {"rope_theta": 5000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}},
        {"rope_theta": 5000.0, "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 2, 2]}},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "default", "xdrope_section": [1, 1, 2, 2]}},
    ],
)
def test_published_spellings_are_read(tmp_path: Path, layout: str, spelt: dict[str, Any]) -> None:
    draft = simple_draft("dflash")
    draft.save(tmp_path / "draft", layout, target=target_ends())
    config = json.loads((tmp_path / "draft/config.json").read_text())
    network = config if layout == "zlab" else config["transformer_layer_config"]
    for name in ("rope_parameters", "rope_theta", "rope_scaling"):
        network.pop(name, None)
    network |= spelt
    (tmp_path / "draft/config.json").write_text(json.dumps(config))
    again = Draft.load(tmp_path / "draft", strict=True)
    assert again.config.meaning() == draft.config.meaning()
    again.save(tmp_path / "again", layout, target=target_ends())
    assert "mrope" not in (tmp_path / "again/config.json").read_text()


def test_a_scaled_embedding_keeps_its_scaling() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    parameters, _ = read({"rope_theta": 1e6, "rope_scaling": {**yarn, "mrope_section": [2, 2, 2]}})
    assert parameters == {"rope_theta": 1e6, **yarn}


# --- how many channels rotate -----------------------------------------------------------------------------------------


@given(data=st.data(), head_dim=st.integers(1, 128).map(lambda half: 2 * half))
def test_the_number_of_channels_is_the_one_that_is_given(data: st.DataObject, head_dim: int) -> None:
    rotary = 2 * data.draw(st.integers(1, head_dim // 2))
    parameters, notes = read({"rope_parameters": {"rope_theta": 1e4, "rope_dim": rotary}}, head_dim)
    assert "rope_dim" not in parameters
    assert int(head_dim * parameters["partial_rotary_factor"]) == rotary
    assert notes == []


def test_the_number_of_channels_stands_before_their_share() -> None:
    """As in SGLang and vLLM, which then leave the share, a target's, aside."""
    given = {"rope_theta": 1e4, "rope_dim": 6, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1]}
    parameters, notes = read({"rope_parameters": given})
    assert parameters == {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert "partial_rotary_factor is 0.25, but rope_dim is 6" in notes[1]


@pytest.mark.parametrize("rotary", [0, -2, 14, True, 6.0, "6"])
def test_a_number_of_channels_that_cannot_be_is_refused(rotary: Any) -> None:
    with pytest.raises(LayoutError, match=r"rope_dim is .*; allowed: an integer from 1 to head_dim, which is 12"):
        read({"rope_theta": 1e4, "rope_parameters": {"rope_dim": rotary}})


# --- a fresh draft's, from its target ---------------------------------------------------------------------------------


def target(**rope: Any) -> TargetInfo:
    text = Qwen3Config(
        vocab_size=99,
        hidden_size=48,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        intermediate_size=80,
    )
    text.rope_parameters = {"rope_theta": 1e7, "rope_type": "default", **rope}
    return TargetInfo(text)


SECTION = DFlashSection(mask_token_id=98, block_size=7, num_hidden_layers=2)


def test_a_multimodal_targets_embedding_is_taken_for_one_position() -> None:
    taken = draft_config(SECTION, target(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5))
    assert taken.rope.as_parameters() == {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.5}


def test_what_a_draft_cannot_have_names_the_way_out() -> None:
    with pytest.raises(DraftsmithError, match=r"llama_4_scaling_beta = 0\.1, .*set draft\.rope_theta for a plain one"):
        draft_config(SECTION, target(llama_4_scaling_beta=0.1))
