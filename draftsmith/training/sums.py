"""Sums that are divided once: the loss and every metric, over micro-batches, ranks and steps alike."""

import torch
from accelerate import Accelerator
from torch import Tensor

Averages = dict[str, float | list[float | None] | None]


class Sums:
    """Named (numerator, denominator) pairs, each a scalar or one entry per label [P]; kept in float64.

    Nothing is averaged before the end: `averages` divides the sums, so a rank or a micro-batch with few labels weighs
    exactly as much as its labels do.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, numerator: Tensor, denominator: Tensor) -> None:
        """Adds a pair of one shape, scalar or [P], to those of this name; nothing is recorded by autograd."""
        numerator, denominator = numerator.detach().double(), denominator.detach().double()
        if name in self._pairs:
            numerator, denominator = self._pairs[name][0] + numerator, self._pairs[name][1] + denominator
        self._pairs[name] = (numerator, denominator)

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they were first added."""
        return tuple(self._pairs)

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        return self._pairs[name]

    def over_ranks(self, accelerator: Accelerator) -> "Sums":
        """The sums of all ranks (each must hold the same names and shapes), by one reduction."""
        if accelerator.num_processes == 1 or not self._pairs:
            return self
        tensors = [tensor for pair in self._pairs.values() for tensor in pair]
        total = accelerator.reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), reduction="sum")
        parts = iter(torch.split(total, [tensor.numel() for tensor in tensors]))
        reduced = Sums()
        for name, (numerator, denominator) in self._pairs.items():
            reduced.add(name, next(parts).view_as(numerator), next(parts).view_as(denominator))
        return reduced

    def averages(self) -> Averages:
        """Name -> numerator / denominator as numbers; None where nothing was counted."""
        result: Averages = {}
        for name, (numerator, denominator) in self._pairs.items():
            values = [
                top / bottom if bottom > 0 else None
                for top, bottom in zip(
                    numerator.reshape(-1).tolist(), denominator.expand_as(numerator).reshape(-1).tolist(), strict=True
                )
            ]
            result[name] = values if numerator.dim() else values[0]
        return result

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The sums on the CPU, for a checkpoint."""
        return {name: [tensor.cpu() for tensor in pair] for name, pair in self._pairs.items()}

    @classmethod
    def from_state(cls, state: dict[str, list[Tensor]], device: torch.device) -> "Sums":
        """What `state_dict` gave, on `device`."""
        sums = cls()
        for name, (numerator, denominator) in state.items():
            sums.add(name, numerator.to(device), denominator.to(device))
        return sums
