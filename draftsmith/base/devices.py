"""Devices as users write them, and the current one of a thread."""

from contextlib import AbstractContextManager, nullcontext

import torch

from draftsmith.errors import DraftsmithError


def current(device: torch.device) -> AbstractContextManager[object]:
    """While open, a CUDA device is the current one of this thread, on which kernels are launched and events recorded
    whatever device their tensors are on. Whoever runs a target, or launches kernels on its tensors, opens it; for
    another device it does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def parse_device(device: str | torch.device, option: str = "device") -> torch.device | None:
    """A device that draftsmith runs on, whether it is there or not; None for 'auto'. Raises `DraftsmithError`, which
    names the option, for another."""
    if device == "auto":
        return None
    unknown = f"{option} is {str(device)!r}; use 'auto', 'cpu', 'cuda' or 'cuda:N'"
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise DraftsmithError(unknown) from error
    if parsed.type not in ("cpu", "cuda"):
        raise DraftsmithError(unknown)
    return parsed


def resolve_device(device: str | torch.device, option: str = "device") -> torch.device:
    """A torch device; 'auto' is cuda if there is one, else cpu. Raises `DraftsmithError`, which names the option, for
    one that draftsmith does not run on or that is not there."""
    resolved = parse_device(device, option)
    if resolved is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        seen = f"{count} CUDA devices" if count else "no CUDA device"
        raise DraftsmithError(f"{option} is {str(device)!r}, but torch sees {seen}; use 'cpu' or 'auto'")
    return resolved
