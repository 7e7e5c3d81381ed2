"""Who a target is, by its layers: a fine-tune is another model, a copy of another precision is not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.errors import DraftsmithError
from draftsmith.targets.location import Location, locate
from draftsmith.targets.sampled import layers_fingerprint
from tests.support.tiny import tiny_model


def saved(directory: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: object) -> Path:
    tiny_model(kind, dtype=dtype).save_pretrained(directory, **options)
    return directory


def fingerprint(directory: Path) -> str | None:
    return layers_fingerprint(locate(directory))


def changed(directory: Path, name: str, change: torch.Tensor | float) -> Path:
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = tensors[name] + change
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_the_same_layers_elsewhere_in_another_precision_and_in_shards(tmp_path: Path) -> None:
    one = fingerprint(saved(tmp_path / "a"))
    assert one is not None
    assert fingerprint(saved(tmp_path / "b", max_shard_size="20KB")) == one
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    wide = tmp_path / "c"
    tiny_model("llama", dtype=torch.bfloat16).float().save_pretrained(wide)
    assert fingerprint(wide) == one


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("matrix", ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"])
def test_an_adapter_merged_into_one_matrix_makes_another_model(tmp_path: Path, layer: int, matrix: str) -> None:
    one = fingerprint(saved(tmp_path / "a"))
    name = f"model.layers.{layer}.{matrix}.weight"
    rows, columns = load_file(tmp_path / "a" / "model.safetensors")[name].shape
    low_rank = torch.outer(torch.randn(rows), torch.randn(columns)).bfloat16()
    assert fingerprint(changed(tmp_path / "a", name, low_rank)) != one


def test_ends_and_single_experts_are_not_asked(tmp_path: Path) -> None:
    one = fingerprint(saved(tmp_path / "a"))
    assert fingerprint(changed(tmp_path / "a", "lm_head.weight", 1.0)) == one
    experts = fingerprint(saved(tmp_path / "m", "qwen3_moe"))
    name = next(n for n in load_file(tmp_path / "m" / "model.safetensors") if ".experts." in n)
    assert fingerprint(changed(tmp_path / "m", name, 1.0)) == experts


def test_what_is_not_known_and_what_is_damaged(tmp_path: Path) -> None:
    assert layers_fingerprint(Location("org/model", "org/model", None)) is None
    directory = saved(tmp_path / "a", max_shard_size="20KB")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.layers.2.mlp.up_proj.weight"]
    (directory / file).write_bytes((directory / file).read_bytes()[:100])
    with pytest.raises(DraftsmithError, match=f"{file} is not a complete safetensors file"):
        fingerprint(directory)
    (directory / file).unlink()
    with pytest.raises(DraftsmithError, match=f"{file} cannot be read"):
        fingerprint(directory)
