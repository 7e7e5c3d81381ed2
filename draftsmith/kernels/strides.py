"""Strides of tensors as kernels are given them."""

from torch import Tensor


def outer_strides(*tensors: Tensor) -> tuple[int, ...]:
    """All strides but the last of each tensor, one tensor after the other."""
    return tuple(step for tensor in tensors for step in tensor.stride()[:-1])


def position_strides(positions: Tensor) -> tuple[int, int]:
    """Of rows and of tokens: of positions [batch, w], or of first positions [batch], which all of a row share."""
    return positions.stride(0), positions.stride(1) if positions.dim() == 2 else 0
