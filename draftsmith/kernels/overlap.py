"""Kernels of one stream that begin before the one before them has ended (programmatic dependent launch, sm_90 on).

A kernel launched so may start as soon as every program of its predecessor has: it computes addresses and fetches
weights, which nobody writes, and then waits (`gdc_wait`) until the predecessor is done and its results are visible.
Every kernel of the decode step waits before it reads or writes anything else, so each also follows all kernels before
its predecessor. Results are the same with and without. Whoever changes weights does so with ordinary launches, which
stand between: a step begins with the embedding, which is one, too.
"""

import functools
import os

import torch


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on this device are launched so: NVIDIA, compute capability 9 or higher, not interpreted."""
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(device: torch.device, early: bool = True) -> dict[str, bool]:
    """Launch arguments of a kernel that has the constexpr OVERLAP: `kernel[grid](..., **overlapping(device))`.

    early=False: this one begins when all kernels before it have ended, so that those launched after it may read, before
    they wait, whatever was written before it.
    """
    return {"OVERLAP": True, "launch_pdl": early} if can_overlap(device) else {"OVERLAP": False}
