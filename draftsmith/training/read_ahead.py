"""Making the next micro-batch while the draft trains on this one, in a thread of the same process."""

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

Batch = TypeVar("Batch")
Moved = TypeVar("Moved", covariant=True)


class Movable(Protocol[Moved]):
    """What becomes a batch on a device."""

    def to(self, device: torch.device) -> Moved: ...


@dataclass(frozen=True)
class _Made(Generic[Batch]):
    """A batch on the training device and when it is complete there, or the error that ended the work, or its end."""

    batch: Batch | None = None
    ready: torch.cuda.Event | None = None
    error: BaseException | None = None


def read_ahead(batches: Iterator[Movable[Batch]], device: torch.device) -> Generator[Batch, None, None]:
    """The same batches, on `device`, each made while the one before it is in use; an error is raised where its batch
    would come. On a GPU the thread has a stream of its own, so that both works overlap there as well."""
    made: queue.Queue[_Made[Batch]] = queue.Queue(maxsize=1)
    over = threading.Event()

    def put(item: _Made[Batch]) -> None:
        while not over.is_set():
            try:
                return made.put(item, timeout=0.1)
            except queue.Full:
                continue
        return None

    def work() -> None:
        try:
            for batch, ready in _on_device(batches, device):
                put(_Made(batch, ready))
                if over.is_set():
                    return
            put(_Made())
        except BaseException as error:  # noqa: BLE001  (raised by the consumer)
            put(_Made(error=error))

    thread = threading.Thread(target=work, name="read ahead", daemon=True)
    thread.start()
    try:
        while True:
            item = made.get()
            if item.error is not None:
                try:
                    raise item.error
                finally:
                    del item  # else error and frame hold each other, and what made the batches outlives the error
            if item.batch is None:
                return
            if item.ready is not None:
                _hand_over(item.batch, item.ready)
            yield item.batch
    finally:
        over.set()
        thread.join()


def _on_device(
    batches: Iterator[Movable[Batch]], device: torch.device
) -> Iterator[tuple[Batch, torch.cuda.Event | None]]:
    if device.type != "cuda":
        for batch in batches:
            yield batch.to(device), None
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        for batch in batches:
            moved = batch.to(device)
            ready = torch.cuda.Event()
            ready.record()
            yield moved, ready


def _hand_over(batch: object, ready: torch.cuda.Event) -> None:
    """Let the current stream wait for the batch, and its memory for the current stream."""
    stream = torch.cuda.current_stream()
    stream.wait_event(ready)
    for tensor in tensors_of(batch):
        tensor.record_stream(stream)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in a tensor, a dictionary or a dataclass, and in what these hold."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_of(inner)
    elif hasattr(value, "__dataclass_fields__"):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
