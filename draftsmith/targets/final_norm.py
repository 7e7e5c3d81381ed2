"""The norm between a target's last layer and its output head, alone."""

from pathlib import Path

import torch
from torch import nn

from draftsmith.base.devices import resolve_device
from draftsmith.base.dtypes import parse_dtype
from draftsmith.errors import DraftsmithError
from draftsmith.targets.decoder import decoder_of
from draftsmith.targets.location import empty_model, locate, read_config
from draftsmith.targets.tensors import TensorFiles


def load_final_norm(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The final norm of a target by path (as for `Target.load`), reading no other weights: [..., H] -> [..., H].

    It is the module of the model's own class. Raises `DraftsmithError` for a path without a model, or one whose decoder
    has no `norm`.
    """
    location = locate(path)
    config = read_config(location, revision, trust_remote_code)
    model = empty_model(config, trust_remote_code)
    decoder = decoder_of(model)
    norm = getattr(decoder, "norm", None)
    if not isinstance(norm, nn.Module):
        raise DraftsmithError(
            f"the decoder of target {location.source} is a {type(decoder).__name__} without a module `norm`; "
            "draftsmith cannot apply its final norm to states that were stored before it"
        )
    module = next(name for name, module in model.named_modules() if module is norm)
    names = {name: f"{module}.{name}" for name in norm.state_dict()}
    stored = TensorFiles(location, revision, model).read(list(names.values()))
    missing = [name for name in names.values() if name not in stored]
    if missing:
        raise DraftsmithError(f"the weights of {location.source} lack {missing[0]}; the checkpoint is incomplete")
    weights = {name: stored[stored_name] for name, stored_name in names.items()}
    norm.load_state_dict(weights, assign=True)
    resolved = parse_dtype(dtype) or config.get_text_config().dtype or next(norm.parameters()).dtype
    return norm.to(device=resolve_device(device), dtype=resolved).requires_grad_(False)
