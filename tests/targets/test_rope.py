"""Ropes that depend on the length of the text: exact as far as the target's window goes, and no further."""

import logging
from typing import Any

import pytest
import torch

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.dflash import DFlashSection
from draftsmith.decoding.generate import generate
from draftsmith.errors import DraftsmithError
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.rope import length_dependent_type
from draftsmith.targets.target import Target
from tests.support.tiny import tiny_model
from tests.support.tiny_draft import tiny_draft

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 1.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 48,
    "factor": 2.0,
}
PROMPTS = [[5, 9, 2], list(range(60, 97)), [3, 80, 41, 7, 7, 12, 9, 30]]


def model(rope: dict[str, Any]) -> Any:
    return tiny_model("llama", max_position_embeddings=96, rope_parameters=rope)


@torch.no_grad()
def greedily(hf_model: Any, prompt: list[int], length: int) -> list[int]:
    """New tokens up to `length` in all, each from a forward of the whole text, alone."""
    ids = list(prompt)
    while len(ids) < length:
        ids.append(int(hf_model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("rope", "window"), [(DYNAMIC, 96), (LONG, 48)], ids=["dynamic", "longrope"])
def test_a_text_is_the_models_own_up_to_the_window_beside_any_neighbours(rope, window):
    hf_model = model(rope)
    target = Target.from_model(hf_model)
    assert target.max_position_embeddings == window
    expected = [greedily(hf_model, prompt, window) for prompt in PROMPTS]
    for draft in (None, tiny_draft(target, block_size=5)):
        found = generate(target, draft, PROMPTS, max_new_tokens=200)
        assert [one.token_ids for one in found] == expected
        assert {one.finish_reason for one in found} == {"length"}
    with pytest.raises(DraftsmithError, match=f"{window}"):
        generate(target, None, [[1] * (window + 1)], max_new_tokens=1)


def test_beyond_the_window_longrope_turns_all_of_a_text_otherwise():
    """What the window is for."""
    target = Target.from_model(model(LONG))
    ids = torch.randint(97, (1, 49), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(49)[None]
    within = target.forward(ids[:, :48], positions[:, :48]).final_state
    assert torch.allclose(target.forward(ids[:, :20], positions[:, :20]).final_state, within[:, :20], atol=1e-5)
    assert not torch.allclose(target.forward(ids, positions).final_state[:, :48], within, atol=1e-2)


def test_a_shorter_window_is_told_and_is_the_same_without_weights(tmp_path, caplog):
    model(LONG).save_pretrained(tmp_path)
    options = TargetOptions(path=str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="draftsmith"):
        target = Target.load(tmp_path)
    assert "texts may have 48 tokens, not 96" in caplog.text
    for facts in (TargetInfo.load(options), target):
        assert facts.max_position_embeddings == 48
        assert length_dependent_type(facts.text_config) is not None
    assert length_dependent_type(tiny_model("gemma3").config) is None


def test_a_fresh_draft_takes_a_rope_that_drafts_have():
    section = DFlashSection(mask_token_id=3, block_size=4, num_hidden_layers=1)
    dynamic = draft_config(section, Target.from_model(model(DYNAMIC)).info)
    assert dynamic.rope.as_parameters() == {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    }
    long = Target.from_model(model(LONG))
    with pytest.raises(DraftsmithError, match=r"'longrope'.*set draft\.rope_theta.*10000"):
        draft_config(section, long.info)
    chosen = draft_config(section.model_copy(update={"rope_theta": 10000.0}), long.info)
    assert (chosen.rope.type, chosen.max_position_embeddings) == ("default", 48)
