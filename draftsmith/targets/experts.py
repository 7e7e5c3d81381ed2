"""How a mixture of experts is run in a step that a graph can hold: without the host looking at the routing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig


@contextmanager
def capturable_experts(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """While open, the experts of the model that `config` belongs to run without host synchronisation on a CUDA device.

    transformers' own loop over the experts that were hit asks the device which these are. Its grouped product takes
    offsets on the device, but only bf16 has a kernel for that; other dtypes multiply with gathered weights. On other
    devices nothing changes. Models without experts do not read the field.
    """
    if device.type != "cuda":
        yield
        return
    before = config._experts_implementation
    config._experts_implementation = "grouped_mm" if dtype == torch.bfloat16 else "batched_mm"
    try:
        yield
    finally:
        config._experts_implementation = before
