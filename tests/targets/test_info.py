"""What a target's configuration says of it, with and without its weights."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from draftsmith.errors import DraftsmithError
from draftsmith.targets.info import TargetInfo
from draftsmith.targets.options import TargetOptions
from draftsmith.targets.target import Target
from tests.support.tiny import KINDS, tiny_model

SIZES = ("hidden_size", "vocab_size", "num_layers", "max_position_embeddings", "softcap", "layer_kinds", "heads")


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_the_configuration_alone_says_what_the_loaded_target_says(kind: str, tmp_path: Path) -> None:
    tiny_model(kind, num_layers=3, vocab_size=71).save_pretrained(tmp_path)
    target = Target.load(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # no weights are read
    options = TargetOptions(path=str(tmp_path), dtype="float16")
    info = TargetInfo.load(options)
    for name in (*SIZES, "kv_heads", "head_dim"):
        assert getattr(info, name) == getattr(target.info, name), name
    same = {field.name for field in fields(TargetInfo)} - {"text_config", "options"}
    assert {name: getattr(info, name) for name in same} == {name: getattr(target.info, name) for name in same}
    assert (info.num_layers, info.vocab_size) == (3, 71) == (len(target.model.model.layers), target.ends.vocab_size)
    assert (info.tied, info.embedding_scale is not None) == ((True, True) if kind == "gemma3" else (False, False))
    assert info.loading() is options
    assert info.loaded_dtype() == torch.float16


def test_a_target_in_memory_cannot_be_loaded_by_others() -> None:
    with pytest.raises(DraftsmithError, match="is in memory only, and has to be loaded from a path here"):
        TargetInfo(tiny_model().config).loading()


def test_a_dtype_that_nobody_names_is_asked_for() -> None:
    config = tiny_model().config
    config.dtype = None
    with pytest.raises(DraftsmithError, match=r"neither target.dtype nor the configuration .* set target.dtype"):
        TargetInfo(config).loaded_dtype()


def test_a_head_of_other_rows_than_the_configuration_says_is_refused() -> None:
    model = tiny_model(vocab_size=40)
    model.config.vocab_size = 39
    with pytest.raises(DraftsmithError, match=r"the output head of .* is \(40, 32\) and its configuration says \(39"):
        Target.from_model(model)
