"""What a device allows a program of a kernel to have."""

import functools

import torch
from triton.runtime import driver

_INTERPRETED, _INTERPRETED_CACHE = 99 * 1024, 2**20  # as if on a small device


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on this device. Tiles that need more do not start; smaller ones
    give the same results."""
    if device.type != "cuda":
        return _INTERPRETED
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.cache
def cache_bytes(device: torch.device) -> int:
    """Bytes of the cache that all programs on this device share."""
    if device.type != "cuda":
        return _INTERPRETED_CACHE
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def stages_that_fit(stages: int, stage_bytes: int, device: torch.device, held_bytes: int = 0) -> int:
    """At most `stages` tiles in flight, at least one: as many as fit beside what a program holds all the time."""
    return max(1, min(stages, (shared_memory(device) - held_bytes) // stage_bytes))
