"""What a device allows: whether it can run Triton's kernels, how much memory a program may use, and whether kernels of
one stream may overlap."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError

_INTERPRETED, _INTERPRETED_CACHE = 99 * 1024, 2**20  # as if on a small device


def need_triton(what: str, otherwise: str = "") -> None:
    """Raises `DraftsmithError` where the package triton is not installed. what: that which needs it; otherwise: another
    way out than to install it, after a comma."""
    if find_spec("triton") is None:
        raise no_triton(what, otherwise)


def no_triton(what: str, otherwise: str = "") -> DraftsmithError:
    """What to raise where triton is missing; arguments as for `need_triton`."""
    return DraftsmithError(
        f"{what} needs the package triton, which is not installed; install it (pip install triton){otherwise}"
    )


_everywhere: ContextVar[bool] = ContextVar("kernels run everywhere", default=False)


def uses_kernels(tensor: Tensor) -> bool:
    """Whether operations on this tensor run as Triton kernels and not as their PyTorch references: on a CUDA device,
    and while `interpreted` is open. The one place where that is decided; every public operation asks here."""
    return tensor.is_cuda or _everywhere.get()


@contextmanager
def interpreted() -> Iterator[None]:
    """While open, operations on tensors of a CPU run as kernels too, in Triton's interpreter, so that these can be
    compared with their references. The environment must have had TRITON_INTERPRET=1 when triton was imported."""
    before = _everywhere.set(True)
    try:
        yield
    finally:
        _everywhere.reset(before)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on this device. Tiles that need more do not start; smaller ones
    give the same results."""
    if device.type != "cuda":
        return _INTERPRETED
    from triton.runtime import driver

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


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on this device may overlap: NVIDIA, compute capability 9 or higher, not interpreted."""
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(device: torch.device, early: bool = True) -> dict[str, bool]:
    """Launch arguments of a kernel that has the constexpr OVERLAP: `kernel[grid](..., **overlapping(device))`.

    Kernels of one stream then begin before the one before them has ended (programmatic dependent launch, sm_90 on). A
    kernel launched so may start as soon as every program of its predecessor has: it computes addresses and fetches
    weights, which nobody writes, and then waits (`gdc_wait`) until the predecessor is done and its results are visible.
    Every kernel of the decode step waits before it reads or writes anything else, so each also follows all kernels
    before its predecessor. Results are the same with and without. Whoever changes weights does so with ordinary
    launches, which stand between: a step begins with the embedding, which is one, too.

    early=False: this one begins when all kernels before it have ended, so that those launched after it may read, before
    they wait, whatever was written before it.
    """
    return {"OVERLAP": True, "launch_pdl": early} if can_overlap(device) else {"OVERLAP": False}
