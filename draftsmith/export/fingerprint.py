"""A draft known again by what it is: its meaning and its weights, whatever layout holds them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.directory import read_draft


def fingerprint(config: DraftConfig, tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of a draft's meaning and of its tensors by canonical name, in the dtype they are exported in."""
    digest = hashlib.sha256(repr(config.meaning()).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu", config.torch_dtype).contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def directory_fingerprint(directory: Path) -> str:
    """The fingerprint of the draft in a directory of any readable layout; raises `DraftsmithError` as reading does."""
    found, config = read_draft(directory)
    return fingerprint(config, found.tensors)
