"""The weights that a forward computes with: those of the run's precision, made from the fp32 ones once a forward."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def working_weights(
    module: nn.Module, dtype: torch.dtype | None, read_first: Sequence[str] = ()
) -> tuple[dict[str, Tensor], Tensor]:
    """(name -> what stands in for each parameter of `module`, a zero that depends on all of them).

    Weights and biases of linear layers are copied to `dtype`, so that they are not cast wherever they are used; other
    parameters, and all where dtype is None, stand in for themselves. Gradients reach the parameters in their own
    dtype. Adding the zero to a loss gives every parameter a gradient, also where the loss depends on none: processes
    that exchange gradients wait for each other's.

    Layers are copied one by one, and the gradients of the last are complete while those of the first are computed:
    what processes exchange then travels beside the backward. read_first: parts of layers (`k_proj`) that are used
    before the first layer runs, too, so that the backward comes to them last.
    """
    linear = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, nn.Linear)
        for name, _ in part.named_parameters(recurse=False)
    }
    groups: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, parameter in module.named_parameters():
        groups[_group(name, read_first)][name] = parameter
    weights: dict[str, Tensor] = {}
    zeros = []
    for group in groups.values():
        dtypes = [dtype if name in linear and dtype is not None else tensor.dtype for name, tensor in group.items()]
        zero, *copies = _Copies.apply(dtypes, *group.values())
        weights |= zip(group, copies, strict=True)
        zeros.append(_at_once(zero))
    return weights, _at_once(_at_once(torch.stack(zeros)).sum())


def _at_once(tensor: Tensor) -> Tensor:
    """Has autograd run the node that made this tensor as soon as it can.

    Of all that is ready it takes what was made last. Copies are made first, and would all wait for the backward's end.
    """
    node: Any = tensor.grad_fn  # torch does not declare the method
    if node is not None:
        node._set_sequence_nr(_AT_ONCE)
    return tensor


_AT_ONCE = 2**64 - 1  # what autograd gives the nodes that store gradients


def _group(name: str, read_first: Sequence[str]) -> str:
    """`...layers.3` of the names of that layer's parameters; one name for all others, and for those `read_first`."""
    before, found, after = name.partition("layers.")
    if not found or any(part in read_first for part in after.split(".")):
        return ""
    return before + found + after.split(".", 1)[0]


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
