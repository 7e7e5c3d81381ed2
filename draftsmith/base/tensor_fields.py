"""Batches: frozen dataclasses of tensors that are moved, and listed, as one."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Self

import torch
from torch import Tensor


class TensorFields:
    """Base of frozen dataclasses whose fields are tensors, dictionaries of tensors, and other such dataclasses.

    Fields of other types are no part of this: copies keep them as they are.
    """

    def tensors(self) -> dict[str, Tensor]:
        """The tensors in the order of the fields, by name; those of a field that holds several as `field.name`."""
        found: dict[str, Tensor] = {}
        for name, value in self._values().items():
            if isinstance(value, Tensor):
                found[name] = value
            elif isinstance(value, TensorFields):
                found |= {f"{name}.{inner}": tensor for inner, tensor in value.tensors().items()}
            elif _is_tensors(value):
                found |= {f"{name}.{inner}": tensor for inner, tensor in value.items()}
        return found

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A copy with every tensor passed through `function`, in the order of `tensors`."""
        changed: dict[str, Any] = {}
        for name, value in self._values().items():
            if isinstance(value, Tensor):
                changed[name] = function(value)
            elif isinstance(value, TensorFields):
                changed[name] = value.mapped(function)
            elif _is_tensors(value):
                changed[name] = {inner: function(tensor) for inner, tensor in value.items()}
        copy: Self = replace(self, **changed)  # type: ignore[type-var]  # every subclass is a dataclass
        return copy

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Self:
        """A copy on `device`; shapes and dtypes stay."""
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


def _is_tensors(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(inner, Tensor) for inner in value.values())
