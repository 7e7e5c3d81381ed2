"""How much arithmetic a training step is, and how much the device could do: MFU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.blocks.blocks import Blocks
from draftsmith.drafts.config import DraftConfig

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


@dataclass(frozen=True)
class Work:
    """What a micro-batch holds: `context` tokens of documents, `slots` of valid blocks, `labels` that count, `pairs` of
    a slot and a key that it sees under full attention."""

    context: int = 0
    slots: int = 0
    labels: int = 0
    pairs: int = 0

    @classmethod
    def of(cls, context: int, positions: Tensor, blocks: Blocks) -> "Work":
        """positions [R, S] int64, of tokens in their documents."""
        size = blocks.input_ids.shape[-1]
        valid = int(blocks.valid.sum())
        seen = positions.gather(1, blocks.anchors)[blocks.valid]  # context before each anchor
        return cls(context, valid * size, int(blocks.label_mask.sum()), (int(seen.sum()) + valid * size) * size)


def training_flops(config: DraftConfig, work: Work) -> float:
    """Multiplications and additions of forward and backward: 2 a weight and token forward, twice that backward, less
    the gradients that nobody needs: of the frozen output head's weight, and of the features that are fused.

    The matrix products of the backbone and the output head, with full attention; a method's own head is not counted.
    """
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    keys_values = 2 * hidden * config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * width + keys_values + 3 * hidden * config.intermediate_size
    fusion = len(config.target_layer_ids) * hidden * hidden
    forward = 2.0 * work.slots * config.num_hidden_layers * layer
    forward += 2.0 * work.context * config.num_hidden_layers * keys_values
    forward += 4.0 * work.pairs * config.num_hidden_layers * width
    return 3.0 * forward + 4.0 * work.context * fusion + 4.0 * work.labels * hidden * config.vocab_size


def peak_flops(device: torch.device, tflops: float | None) -> float | None:
    """The device's peak in FLOP/s: `tflops` where given, else by the GPU's name; None where it is not known."""
    if tflops is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        tflops = next((value for part, value in _PEAK_TFLOPS.items() if part in name), None)
    return None if tflops is None else tflops * 1e12
