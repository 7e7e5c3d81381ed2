"""How much arithmetic a device can do: what MFU is a share of."""

import torch

# Peak dense bf16 TFLOP/s by a part of the device's name, the more particular names first.
_PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}


def peak_flops(device: torch.device, tflops: float | None) -> float | None:
    """The device's peak in FLOP/s: `tflops` where given, else by the GPU's name; None where it is not known."""
    if tflops is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        tflops = next((value for part, value in _PEAK_TFLOPS.items() if part in name), None)
    return None if tflops is None else tflops * 1e12
