"""Checkpoints of tiny models, changed as other people's tools write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def edit_config(directory: Path, **fields: Any) -> None:
    """Sets fields of config.json; ... removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_tensors(directory: Path, change: Change) -> None:
    """Puts what `change` makes of a directory's tensors in their place."""
    path = directory / WEIGHTS
    save_file(change(load_file(path)), path, {"format": "pt"})


def in_eight_bits(weight: Tensor, rows: int = 1, columns: int = 1) -> tuple[Tensor, Tensor]:
    """A matrix as 8-bit floats, and the scales of a grid of [rows, columns] blocks by which these are multiplied."""
    shape = (rows, weight.shape[0] // rows, columns, weight.shape[1] // columns)
    blocks = weight.float().view(shape)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / scales).to(torch.float8_e4m3fn).view(weight.shape)
    return codes, scales.view(rows, columns)


def quantised(*names: str, scale: str = "weight_scale", extra: tuple[str, ...] = ()) -> Change:
    """A change that puts tensors whose names hold one of `names` into 8 bits, with a scale for all of a tensor, and
    `extra` scalars, beside it."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and any(part in name for part in names):
                module = name.removesuffix("weight")
                changed[name], scales = in_eight_bits(tensor)
                changed[f"{module}{scale}"] = scales.reshape(())
                changed |= {f"{module}{other}": torch.ones(()) for other in extra}
            else:
                changed[name] = tensor
        return changed

    return change
