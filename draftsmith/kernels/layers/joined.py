"""Weights that are read together, one below the other in one storage."""

from collections.abc import Sequence

import torch
from torch import Tensor


def join_rows(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor [sum of rows, ...] of parameters [rows, ...] of one dtype, which become views of it, so that memory
    does not double. Parameters that lie so already stay where they are."""
    first = parameters[0]
    if _adjacent(parameters):
        shape = (sum(len(parameter) for parameter in parameters), *first.shape[1:])
        return torch.as_strided(first.detach(), shape, first.stride(), first.storage_offset())
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


def _adjacent(parameters: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors lie one behind the other in one storage."""
    storage = parameters[0].untyped_storage().data_ptr()
    offset = parameters[0].storage_offset()
    for parameter in parameters:
        if parameter.untyped_storage().data_ptr() != storage or parameter.storage_offset() != offset:
            return False
        if not parameter.is_contiguous():
            return False
        offset += parameter.numel()
    return True
