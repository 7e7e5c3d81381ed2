"""What a device allows a program of a kernel to have."""

import functools

import torch
from triton.runtime import driver

_INTERPRETED = 99 * 1024  # as if on a small device


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on this device. Tiles that need more do not start; smaller ones
    give the same results."""
    if device.type != "cuda":
        return _INTERPRETED
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
