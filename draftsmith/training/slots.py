"""Batches that reader processes make in memory which they share with the trainer, used again for every batch.

New memory for every batch costs more than filling it: the system clears each page and enters it in a table, in the
reader, again in the trainer, and again for a pinned copy. Here a reader writes a batch where the GPU copies it from.
"""

import io
import math
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from draftsmith.base.rounding import round_up
from draftsmith.errors import DraftsmithError

Batch = TypeVar("Batch")

_ALIGNMENT = 256  # bytes, as the GPU's own allocator aligns
_SHARED_MEMORY = Path("/dev/shm")

_Place = tuple[int, tuple[int, ...], torch.dtype]
"""Where a tensor begins in its slot, its shape and its dtype."""


@dataclass(frozen=True)
class Packed:
    """A batch that lies in slot `number`: `content` is all of it but its tensors, which end at byte `used`."""

    number: int
    content: bytes
    used: int


class Slot:
    """One slot that a batch is made in. memory: its bytes, uint8 [size], on the CPU."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._used = 0

    @property
    def used(self) -> int:
        """Where the last tensor ends."""
        return self._used

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in the slot, behind the ones before it, holding anything. Raises `DraftsmithError` for a full
        slot."""
        start = aligned(self._used)
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(self._memory):
            raise DraftsmithError(f"a batch of more than {end} bytes was made in a slot of {len(self._memory)}")
        self._used = end
        return _view(self._memory, (start, shape, dtype))

    def place(self, tensor: Tensor) -> _Place:
        """Where `tensor` lies in the slot, after it was copied there if it did not yet."""
        shape = tuple(tensor.shape)
        elsewhere = tensor.untyped_storage().data_ptr() != self._memory.untyped_storage().data_ptr()
        if elsewhere or not tensor.is_contiguous():
            tensor = self.empty(shape, tensor.dtype).copy_(tensor)
        start = int(tensor.storage_offset() * tensor.itemsize - self._memory.storage_offset())
        return start, shape, tensor.dtype


class Slots:
    """`count` slots of `size` bytes for batches on their way to a device.

    shared: the memory is seen by processes that the object is handed to. Raises `DraftsmithError` where the system's
    shared memory has no room for it.
    """

    def __init__(self, count: int, size: int, *, shared: bool) -> None:
        total = count * size
        if shared and _SHARED_MEMORY.is_dir() and total > (free := shutil.disk_usage(_SHARED_MEMORY).free):
            raise DraftsmithError(
                f"reading ahead takes {count} batches of {size / 2**20:,.0f} MiB in shared memory, and "
                f"{_SHARED_MEMORY} has {free / 2**20:,.0f} MiB free: enlarge it, lower train.data_workers (0: none is "
                "needed) or train.tokens_per_row"
            )
        self._memory = torch.empty(count, size, dtype=torch.uint8)
        if shared:
            self._memory.share_memory_()

    def __len__(self) -> int:
        return len(self._memory)

    def slot(self, number: int) -> Slot:
        """Slot `number` for a new batch; the one that lay there is lost."""
        return Slot(self._memory[number])

    @contextmanager
    def pinned(self, device: torch.device) -> Iterator[None]:
        """While open, copies to `device` need no copy in between. Nothing has to be done unless it is a GPU.

        Raises `DraftsmithError` where the GPU's driver refuses.
        """
        if device.type != "cuda":
            yield
            return
        runtime, address = torch.cuda.cudart(), self._memory.data_ptr()
        code = int(runtime.cudaHostRegister(address, self._memory.nbytes, 0))
        if code:
            raise DraftsmithError(
                f"{len(self)} batches to be read ahead, {self._memory.nbytes / 2**20:,.0f} MiB, cannot be pinned for "
                f"the GPU: {torch.cuda.CudaError(code)}; lower train.data_workers or train.tokens_per_row"
            )
        try:
            yield
        finally:
            runtime.cudaHostUnregister(address)

    def filled(self, packed: Packed) -> "Filled[Any]":
        """The batch that `pack` has described, here or in another process."""
        return Filled(self._memory[packed.number, : packed.used], packed.content)


def pack(batch: object, number: int, slot: Slot) -> Packed:
    """Put the tensors of `batch`, any picklable object, into `slot`, whose number is `number`."""
    content = io.BytesIO()
    _Pickler(content, slot).dump(batch)
    return Packed(number, content.getvalue(), slot.used)


@dataclass(frozen=True)
class Filled(Generic[Batch]):
    """A batch in a slot. memory: uint8 [used]; content: all but the tensors."""

    memory: Tensor
    content: bytes

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`, in new memory (one piece for all its tensors). The slot is free when this returns."""
        moved = torch.empty(self.memory.shape, dtype=torch.uint8, device=device)
        moved.copy_(self.memory, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        batch: Batch = _Unpickler(io.BytesIO(self.content), moved).load()
        return batch


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, slot: Slot) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._slot = slot

    def persistent_id(self, value: Any) -> _Place | None:
        return self._slot.place(value) if isinstance(value, Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, place: _Place) -> Tensor:
        return _view(self._memory, place)


def aligned(size: int) -> int:
    """So many bytes, rounded up to where the next tensor may begin."""
    return round_up(size, _ALIGNMENT)


def _view(memory: Tensor, place: _Place) -> Tensor:
    start, shape, dtype = place
    return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
