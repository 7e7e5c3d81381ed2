"""The weights that a forward computes with: those of the run's precision, made from the fp32 ones once a forward."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


def working_weights(module: nn.Module, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], Tensor]:
    """(name -> what stands in for each parameter of `module`, a zero that depends on all of them).

    Weights and biases of linear layers are copied to `dtype`, so that they are not cast wherever they are used; other
    parameters, and all where dtype is None, stand in for themselves. Gradients reach the parameters in their own
    dtype. Adding the zero to a loss gives every parameter a gradient, also where the loss depends on none: processes
    that exchange gradients wait for each other's.

    Layers are copied one by one, so that the gradients of the last are complete while the first are computed.
    """
    linear = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, nn.Linear)
        for name, _ in part.named_parameters(recurse=False)
    }
    groups: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, parameter in module.named_parameters():
        groups[_layer(name)][name] = parameter
    weights: dict[str, Tensor] = {}
    zeros = []
    for group in groups.values():
        dtypes = [dtype if name in linear and dtype is not None else tensor.dtype for name, tensor in group.items()]
        zero, *copies = _Copies.apply(dtypes, *group.values())
        weights |= zip(group, copies, strict=True)
        zeros.append(zero)
    return weights, torch.stack(zeros).sum()


def _layer(name: str) -> str:
    """`...layers.3` of the names of that layer's parameters; one name for all outside of layers."""
    before, found, after = name.partition("layers.")
    return before + found + after.split(".", 1)[0] if found else ""


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtypes: list[torch.dtype], *parameters: Tensor) -> tuple[Tensor, ...]:
        copies = [
            parameter.view_as(parameter) if parameter.dtype == dtype else torch.empty_like(parameter, dtype=dtype)
            for parameter, dtype in zip(parameters, dtypes, strict=True)
        ]
        cast = [(copy, own) for copy, own in zip(copies, parameters, strict=True) if copy.dtype != own.dtype]
        if cast:
            torch._foreach_copy_([copy for copy, _ in cast], [own for _, own in cast])
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return torch.zeros((), device=parameters[0].device), *copies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Copies that nothing depends on come as zeros.
        found = list(gradients[1:])
        cast = [i for i, dtype in enumerate(ctx.dtypes) if found[i].dtype != dtype]
        wide = [torch.empty_like(found[i], dtype=ctx.dtypes[i]) for i in cast]
        if cast:
            torch._foreach_copy_(wide, [found[i] for i in cast])
        for i, gradient in zip(cast, wide, strict=True):
            found[i] = gradient
        return None, *found
