"""What a model keeps between passes, layer by layer, in storage that never moves."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.recurrent.kept import Standing


class TargetCache(Protocol):
    """What a target keeps of the texts in `slots` slots, for passes over their next tokens.

    A pass whose first position is 0 begins a text: nothing of the slot's former text shows in it.
    """

    @property
    def layers(self) -> Sequence["LayerCache"]:
        """What each layer keeps, in the model's order."""
        ...

    @property
    def length(self) -> int:
        """Positions of a slot."""
        ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All storage, [slots, ...] each."""
        ...

    def rows(self, begin: int, end: int) -> Self:
        """The same storage, seen for slots begin .. end - 1 only."""
        ...

    def view(self, extent: int) -> Self:
        """The same storage seen up to position `extent` (exclusive), for a caller who knows on the host that no pass
        reaches further: attention then reads `extent` entries a slot at most."""
        ...

    def erase(self, slots: Sequence[int]) -> None:
        """Zeroes all that is kept of these slots, so that not even a NaN is left."""
        ...

    def settle(self) -> None:
        """Ends a pass that was not tentative, after its last layer: all its valid tokens stand."""
        ...

    def keep(self, count: Tensor, path: Tensor | None = None) -> None:
        """Ends a tentative pass: says which of its tokens stand. The others leave nothing behind.

        count [slots] int64: how many; 0 leaves a slot as it was before the pass. path None: the first ones. path
        [slots, n] int64: places (indices in the cache) of the tokens that stand, in order and rising, from the place of
        the pass's first token on; their entries are moved together, and those from `count` on mean nothing.
        """
        ...


class LayerCache(ABC):
    """What one layer keeps; a `StaticCache` has one for each."""

    standing: Standing | None = None
    """Of a layer that keeps tentative tokens (`kernels.recurrent.kept`): which of them stand, shared by all of them."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All storage, [slots, ...] each."""

    @abstractmethod
    def rows(self, begin: int, end: int) -> Self:
        """As `TargetCache.rows`."""

    @abstractmethod
    def view(self, extent: int) -> Self:
        """As `TargetCache.view`."""

    @abstractmethod
    def keep(self, count: Tensor, path: Tensor | None) -> None:
        """As `TargetCache.keep`."""

    def erase(self, slots: Sequence[int]) -> None:
        """As `TargetCache.erase`."""
        for tensor in self.tensors:
            for slot in slots:
                tensor[slot].zero_()


@dataclass(frozen=True)
class Room:
    """How large a cache is to be. length: positions of a slot; width: most tokens of a tentative pass (one whose tokens
    `keep` may take back); dtype: of the model."""

    slots: int
    length: int
    width: int
    dtype: torch.dtype
    device: torch.device | str

    @cached_property
    def standing(self) -> Standing:
        """The one that all layers of a cache share."""
        return Standing.none(self.slots, self.device)


class LayerShape(Protocol):
    """What a layer keeps, as its model's configuration says."""

    def allocate(self, room: Room) -> LayerCache:
        """Zeroed storage. Zeros and not empty memory: what has weight 0 must not be NaN, for 0 * NaN is NaN."""
        ...


class KeysValues(LayerCache):
    """Keys [slots, kv_heads, length, key_dim] and values [slots, kv_heads, length, value_dim] of an attention layer.

    The entry of a token lies at its place, which is its position unless a pass says otherwise, so nothing has to be
    counted: whoever writes says the places, and whoever reads sees the entries up to its own. Entries further right
    carry no weight, whatever (finite) values they hold, so a chain of rejected tokens needs no erasing.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    def rows(self, begin: int, end: int) -> "KeysValues":
        return KeysValues(self.keys[begin:end], self.values[begin:end])

    def view(self, extent: int) -> "KeysValues":
        return KeysValues(self.keys[:, :, :extent], self.values[:, :, :extent])

    def write(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts keys [slots, kv_heads, w, key_dim] and values [slots, kv_heads, w, value_dim] at places [slots, w]
        int64. Of several tokens of a slot at one place, any one stays. Raises `DraftsmithError` for other shapes."""
        for stored, states in ((self.keys, keys), (self.values, values)):
            expected = (len(stored), stored.shape[1], places.shape[1], stored.shape[3])
            if states.shape != expected:
                raise DraftsmithError(
                    f"an attention layer gives keys {tuple(keys.shape)} and values {tuple(values.shape)} where the "
                    f"cache holds {expected}: this kind of attention is not supported for cached decoding"
                )
            stored.scatter_(2, places[:, None, :, None].expand(states.shape), states)

    def keep(self, count: Tensor, path: Tensor | None) -> None:
        if path is not None:
            for stored in self.tensors:
                _move_together(stored, count, path)


@dataclass(frozen=True)
class KeysValuesShape:
    """An attention layer's part of a cache."""

    kv_heads: int
    key_dim: int
    value_dim: int

    def allocate(self, room: Room) -> KeysValues:
        shape = (room.slots, self.kv_heads, room.length)
        keys, values = (
            torch.zeros(*shape, dim, dtype=room.dtype, device=room.device) for dim in (self.key_dim, self.value_dim)
        )
        return KeysValues(keys, values)


class StaticCache:
    """A `TargetCache` of layers of any kind; drafts keep their context in one as well.

    Storage is allocated once and written in place, so that a captured graph stays valid. layers: in the model's order.
    length: positions of a slot. joint [layers, 2, slots, kv_heads, length, d]: the keys and values of all layers, where
    all are attention layers of one shape (the layers are views of it); None where they are not.
    """

    def __init__(self, layers: Sequence[LayerCache], length: int, joint: Tensor | None = None) -> None:
        self.layers = tuple(layers)
        self.length = length
        self.joint = joint
        self._standing = next((layer.standing for layer in self.layers if layer.standing is not None), None)

    @classmethod
    def allocate(cls, shapes: Sequence[LayerShape], room: Room) -> "StaticCache":
        """A zeroed cache. Raises `DraftsmithError` for a room without slots or positions."""
        if room.slots < 1 or room.length < 1:
            raise DraftsmithError(f"a cache of {room.slots} rows x {room.length} tokens; both must be at least 1")
        first = shapes[0]
        if (
            isinstance(first, KeysValuesShape)
            and first.key_dim == first.value_dim
            and all(shape == first for shape in shapes)
        ):
            shape = (len(shapes), 2, room.slots, first.kv_heads, room.length, first.key_dim)
            return cls._of_joint(torch.zeros(shape, dtype=room.dtype, device=room.device))
        return cls([shape.allocate(room) for shape in shapes], room.length)

    @classmethod
    def _of_joint(cls, joint: Tensor) -> "StaticCache":
        return cls([KeysValues(*layer.unbind()) for layer in joint.unbind()], joint.shape[4], joint)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All storage, [slots, ...] each."""
        return tuple(tensor for layer in self.layers for tensor in layer.tensors)

    def rows(self, begin: int, end: int) -> "StaticCache":
        """As `TargetCache.rows`."""
        if self.joint is not None:
            return self._of_joint(self.joint[:, :, begin:end])
        return StaticCache([layer.rows(begin, end) for layer in self.layers], self.length)

    def view(self, extent: int) -> "StaticCache":
        """As `TargetCache.view`. Raises `DraftsmithError` for one without positions or beyond the cache."""
        if not 1 <= extent <= self.length:
            raise DraftsmithError(f"a view of {extent} positions of a cache of {self.length}; allowed is 1 to that")
        if self.joint is not None:
            return self._of_joint(self.joint[..., :extent, :])
        return StaticCache([layer.view(extent) for layer in self.layers], extent)

    def repeated(self, slots: int) -> "StaticCache":
        """A cache of one slot seen as `slots` equal ones, which share its storage: to be read only. Raises
        `DraftsmithError` for layers whose caches are not attention's of one shape."""
        if self.joint is None:
            raise DraftsmithError("only a cache of equal attention layers can be seen as several slots")
        return self._of_joint(self.joint.expand(-1, -1, slots, -1, -1, -1))

    def erase(self, slots: Sequence[int]) -> None:
        """As `TargetCache.erase`."""
        if self.joint is not None:
            for slot in slots:
                self.joint[:, :, slot].zero_()
        else:
            for layer in self.layers:
                layer.erase(slots)

    def settle(self) -> None:
        """As `TargetCache.settle`."""
        if self._standing is not None:
            self._standing.passed(0)

    def keep(self, count: Tensor, path: Tensor | None = None) -> None:
        """As `TargetCache.keep`. Never waits for the device, so that a graph can hold it."""
        if self._standing is not None:
            self._standing.passed(count)
        if self.joint is None:
            for layer in self.layers:
                layer.keep(count, path)
        elif path is not None:
            _move_together(self.joint.flatten(0, 1), count, path)


def _move_together(stored: Tensor, count: Tensor, path: Tensor) -> None:
    """Moves the entries at path[:, j] to path[:, 0] + j for j < count: stored [..., slots, kv_heads, length, d]."""
    step = torch.arange(path.shape[1], device=path.device)
    there = path[:, :1] + step  # [slots, n]
    # Entries that mean nothing stay: they are written where they are read. All are read before any is written.
    here = torch.where(step < count[:, None], path, there)
    shape = (*stored.shape[:-2], len(step), stored.shape[-1])
    entries = stored.gather(-2, here[:, None, :, None].expand(shape))
    stored.scatter_(-2, there[:, None, :, None].expand(shape), entries)
