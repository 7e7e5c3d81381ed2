"""The machine that a benchmark ran on: what its speeds hold for."""

import os
import platform
from importlib import metadata
from typing import Any

import torch
import transformers


def machine(device: torch.device) -> dict[str, Any]:
    """The name of the device, what the CPU lends to it, and the versions that decide how fast it decodes. triton: None
    where it is not installed."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or str(device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": _triton_version(),
    }


def _triton_version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
