"""Checkpoints whose weights are stored in few bits: refused by name where they would be read without their scales."""

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

MODELOPT_FILE = "hf_quant_config.json"
"""What NVIDIA's ModelOpt writes beside a model that it quantised, with or without an entry in config.json."""

# Scales of a cache of keys and values that a server keeps in 8 bits, which nothing here does.
_CACHE_SCALES = frozenset(["k_scale", "v_scale", "q_scale", "output_scale"])


def quantisation(config: PretrainedConfig) -> dict[str, Any] | None:
    """What a configuration says of its checkpoint's quantisation; None where it says nothing."""
    for holder in (config, config.get_text_config()):
        said = getattr(holder, "quantization_config", None)
        if said is not None:
            return dict(said if isinstance(said, dict) else said.to_dict())
    return None


def quantisation_fault(config: PretrainedConfig, modelopt_file: bool) -> str | None:
    """Why a checkpoint with this configuration is not read, for a message that names the target; None where nothing
    speaks against it. modelopt_file: whether `MODELOPT_FILE` lies beside it."""
    said = quantisation(config)
    if said is None and not modelopt_file:
        return None
    way_out = "use the model that it was made from, or another quantisation of that"
    if said is None:
        return (
            f"ModelOpt quantised it ({MODELOPT_FILE}), and transformers would load it without its scales, since "
            f"config.json has no quantization_config; {way_out}"
        )
    if said.get("load_in_8bit"):
        return (
            "bitsandbytes quantised it to 8 bits (LLM.int8), which makes a token's states depend on the other texts of "
            "the batch, so that neither features nor verified tokens would be the model's own; use 4 bits (NF4), or "
            "the model that it was made from"
        )
    method = "bitsandbytes_4bit" if said.get("load_in_4bit") else said.get("quant_method")
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return (
            f"it is quantised by {method!r}, and transformers {transformers.__version__} would load it without its "
            f"scales: it reads {', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}; {way_out}"
        )
    return None


def left_unread(model: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Tensors of a checkpoint that belong to a module with weights of its own, which has no use for them: scales that
    were not applied, say. The model computes something else than its checkpoint.

    unexpected: the tensors that the loaded `model` did not take, by its own names. Whole modules that it lacks (layers
    for the prediction of several tokens, say) do not count.
    """
    modules = dict(model.named_modules())
    found = []
    for name in sorted(unexpected):
        parent, _, leaf = name.rpartition(".")
        while parent not in modules:
            parent = parent.rpartition(".")[0]
        owner = modules[parent]
        own = {*dict(owner.named_parameters(recurse=False)), *dict(owner.named_buffers(recurse=False))}
        # A quantised layer's bias is its quantiser's matter: some write zeros for layers that have none.
        theirs = leaf == "bias" and "weight" not in own
        if own and leaf not in own and leaf not in _CACHE_SCALES and not theirs:
            found.append(name)
    return found


def dequantised(weight: Tensor, scale: Tensor) -> Tensor | None:
    """8-bit floats [V, H] times their scale, in fp32: one for all of them, one a row ([V] or [V, 1]), or one a block of
    a grid that divides the matrix. None for a scale of another shape."""
    rows, columns = weight.shape
    if scale.numel() == 1:
        grid = (1, 1)
    elif scale.shape in ((rows,), (rows, 1)):
        grid = (rows, 1)
    elif scale.ndim == 2 and rows % scale.shape[0] == 0 and columns % scale.shape[1] == 0:
        grid = (scale.shape[0], scale.shape[1])
    else:
        return None
    blocks = weight.to(torch.float32).view(grid[0], rows // grid[0], grid[1], columns // grid[1])
    return (blocks * scale.to(torch.float32).view(grid[0], 1, grid[1], 1)).view(rows, columns)
