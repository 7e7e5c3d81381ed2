"""The end of an optimiser step: divide the summed gradients, clip them, apply them, unless they are not finite."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.training.options import TrainOptions
from draftsmith.training.parallel import Parallel, local
from draftsmith.training.schedule import build_optimizer


@dataclass(frozen=True)
class Update:
    """What one update was, on the device: `norms` [P], the norm of every parameter's gradient before clipping, in the
    order of `Updater.names`; `norm`, of all together; `finite`, scalar bool, whether the update was applied."""

    norms: Tensor
    norm: Tensor
    finite: Tensor


class Updater:
    """The optimiser and how it is fed.

    Nothing here waits for the device. Whether a step is finite is found out there, and the optimiser's kernel leaves
    weights, moments and its own step count alone where it is not; the host may learn of it later.
    """

    def __init__(self, module: nn.Module, parallel: Parallel, options: TrainOptions) -> None:
        self._parallel = parallel
        self._clip = options.clip
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self.optimizer = build_optimizer(module, options)
        for parameter in self._parameters:
            # What AdamW makes of itself in its first step; made now, so that a checkpoint can be read into it.
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def clear(self) -> None:
        """Forgets the gradients; the next backward makes new ones."""
        self.optimizer.zero_grad(set_to_none=True)

    def apply(self, numerator: Tensor, denominator: Tensor, rate: float) -> Update:
        """Gradients of the sum of numerators, divided by the sum of denominators (scalars, over all processes).

        A step without a label has the denominator 0 and the gradient 0. The gradients are those of the last backward.
        """
        gradients = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        # The processes' mean stands there, where the sum is wanted.
        scale = torch.where(denominator > 0, self._parallel.num_processes / denominator.clamp_min(1e-300), 0.0).float()
        norms = self._parallel.norms(gradients) * scale
        norm = torch.linalg.vector_norm(norms)
        finite = torch.isfinite(norm) & torch.isfinite(numerator)
        if self._clip is not None:
            scale = scale * (self._clip / (norm + 1e-6)).clamp_max(1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        optimizer: Any = self.optimizer
        # The fused kernel divides gradients by the one as it reads them, and does nothing where the other is 1. Without
        # a label the scale is 0, and so are the gradients: any divisor will do.
        optimizer.grad_scale = torch.where(scale > 0, 1.0 / scale, 1.0)
        optimizer.found_inf = (~finite).float()
        optimizer.step()
        return Update(norms, norm, finite)

    def tensors(self) -> dict[str, Tensor]:
        """The optimiser's state by name, `exp_avg.draft.backbone...`: the tensors themselves."""
        return {
            f"{key}.{name}": value
            for name, parameter in zip(self.names, self._parameters, strict=True)
            for key, value in self.optimizer.state[parameter].items()
        }
