"""The final norm alone is the model's own."""

from pathlib import Path

import pytest
import torch

from draftsmith.errors import DraftsmithError
from draftsmith.targets.final_norm import load_final_norm
from tests.support.checkpoints import edit_tensors
from tests.support.tiny import KINDS, tiny_model


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_models_own(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model.get_decoder().norm(states)
    norm = load_final_norm(tmp_path)
    assert torch.equal(norm(states), wanted)
    assert not torch.equal(norm(states * 3 + 1), wanted)


def test_a_checkpoint_without_it_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "model.norm.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(DraftsmithError, match=r"lack model\.norm\.weight"):
        load_final_norm(tmp_path)


def test_norms_within_layers_are_others(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors | {"model.layers.0.mixer.norm.weight": torch.zeros(32)})
    assert torch.equal(load_final_norm(tmp_path).weight, model.model.norm.weight)
