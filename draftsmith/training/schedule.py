"""The learning rate of each optimiser step, and the optimiser."""

import math

import torch
from torch import nn

from draftsmith.training.options import TrainOptions


def learning_rate(step: int, total_steps: int, options: TrainOptions) -> float:
    """The rate of optimiser step `step` (0-based): linear warm-up, then a cosine.

    The warm-up takes ceil(warmup_ratio * total_steps) steps and its first step is already above zero; the last step
    of the run is one short of the cosine's end, so that no step is spent at rate zero.
    """
    warmup_steps = math.ceil(options.warmup_ratio * total_steps)
    if step < warmup_steps:
        return options.lr * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return options.lr * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * cosine)


def build_optimizer(module: nn.Module, options: TrainOptions) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of `module`; matrices decay, vectors (norms, biases) do not.

    The fused one on every device: it can be told, on the device, to leave a step out (`found_inf`).
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=options.lr, betas=options.betas, fused=True
    )
