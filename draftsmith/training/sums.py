"""Sums that are divided once: the loss and every metric, over micro-batches, ranks and steps alike."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

Averages = dict[str, float | list[float | None] | None]
Pair = tuple[Tensor, Tensor]
"""(numerator, denominator)."""


class Sums:
    """Named (numerator, denominator) pairs, of one shape each: scalars, or one entry per label [P].

    All of them lie in one tensor, so that adding, reducing or copying them is one operation however many there are:
    `values` [2, n] float64, numerators above their denominators; `shapes`: name -> shape, in the order of the columns.
    Nothing is averaged before the end: `averages` divides the sums, so a rank or a micro-batch with few labels weighs
    exactly as much as its labels do.
    """

    def __init__(self, shapes: Mapping[str, torch.Size] | None = None, values: Tensor | None = None) -> None:
        self._shapes = dict(shapes or {})
        self._values = torch.zeros(2, 0, dtype=torch.float64) if values is None else values

    @classmethod
    def of(cls, pairs: Mapping[str, Pair]) -> "Sums":
        """Copies of pairs of floating point numbers; of one dtype they are copied at once. Nothing is recorded by
        autograd."""
        rows = [pair[side].detach() for side in (0, 1) for pair in pairs.values()]
        values = torch.cat([row.reshape(-1) for row in rows]).double()
        return cls({name: numerator.shape for name, (numerator, _) in pairs.items()}, values.view(2, -1))

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they were first added."""
        return tuple(self._shapes)

    def __getitem__(self, name: str) -> Pair:
        begin = 0
        for other, shape in self._shapes.items():
            if other == name:
                numerator, denominator = self._values[:, begin : begin + shape.numel()]
                return numerator.view(shape), denominator.view(shape)
            begin += shape.numel()
        raise KeyError(name)

    def plus(self, other: "Sums") -> "Sums":
        """The sums of both; a name that only one of them has keeps what it has there."""
        if self._shapes == other._shapes:
            return Sums(self._shapes, self._values + other._values)
        if not self._shapes:
            return other
        pairs = {name: self[name] for name in self.names}
        for name in other.names:
            added = other[name]
            pairs[name] = (pairs[name][0] + added[0], pairs[name][1] + added[1]) if name in pairs else added
        return Sums.of(pairs)

    def where(self, counts: Tensor) -> "Sums":
        """These sums if `counts`, a scalar bool on their device, is true, else zeros: also in place of NaN."""
        return Sums(self._shapes, torch.where(counts, self._values, 0.0))

    def over_ranks(self, accelerator: Accelerator) -> "Sums":
        """The sums of all ranks (each must hold the same names and shapes), by one reduction."""
        if accelerator.num_processes == 1 or not self._shapes:
            return self
        return Sums(self._shapes, accelerator.reduce(self._values, reduction="sum"))

    def averages(self) -> Averages:
        """Name -> numerator / denominator as numbers; None where nothing was counted."""
        tops, bottoms = self._values.tolist()
        quotients = iter([top / bottom if bottom > 0 else None for top, bottom in zip(tops, bottoms, strict=True)])
        result: Averages = {}
        for name, shape in self._shapes.items():
            values = [next(quotients) for _ in range(shape.numel())]
            result[name] = values if shape else values[0]
        return result

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Name -> [numerator, denominator] on the CPU, for a checkpoint."""
        on_host = Sums(self._shapes, self._values.cpu())
        return {name: [tensor.clone() for tensor in on_host[name]] for name in self.names}

    @classmethod
    def from_state(cls, state: dict[str, list[Tensor]], device: torch.device) -> "Sums":
        """What `state_dict` gave, on `device`."""
        if not state:
            return cls()
        return cls.of({name: (top.to(device), bottom.to(device)) for name, (top, bottom) in state.items()})
