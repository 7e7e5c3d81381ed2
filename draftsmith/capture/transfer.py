"""Features from the device to the host while the device goes on computing."""

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.base.rounding import round_up

# One that the device writes to, one that waits for its event, one that is copied into records.
BUFFERS = 3
_ALIGNMENT = 16


@dataclass(frozen=True)
class Arriving:
    """Tensors on their way to the host: valid once `wait` has returned, until `release` is called.

    `lasting`: the tensors need no copy, they belong to whoever holds them also after `release`.
    """

    tensors: dict[str, Tensor]
    wait: Callable[[], None]
    release: Callable[[], None]
    lasting: bool


class HostTransfer:
    """Moves named tensors to the host. From a GPU: on a stream of its own, through page-locked buffers that are used
    again; where all are in use, `start` waits for one. From a CPU: nothing is to be done."""

    def __init__(self) -> None:
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._buffers.put(torch.empty(0, dtype=torch.uint8))
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, tensors: Mapping[str, Tensor]) -> Arriving:
        """Begin to move `tensors`, which lie on one device and are complete in its current stream's order."""
        device = next(iter(tensors.values())).device
        if device.type != "cuda":
            return Arriving({name: tensor.cpu() for name, tensor in tensors.items()}, _nothing, _nothing, lasting=True)
        buffer = self._buffer(sum(round_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors.values()))
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        on_host: dict[str, Tensor] = {}
        start = 0
        with torch.cuda.stream(stream):
            for name, tensor in tensors.items():
                room = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                on_host[name] = room.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)  # not given away before it is copied
                start += round_up(tensor.nbytes, _ALIGNMENT)
            copied = torch.cuda.Event()
            copied.record()
        return Arriving(on_host, copied.synchronize, lambda: self._buffers.put(buffer), lasting=False)

    def _buffer(self, size: int) -> Tensor:
        buffer = self._buffers.get()
        if buffer.nbytes < size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return buffer


def _nothing() -> None:
    pass
