"""The processes that a launcher (torchrun, accelerate launch) has started together: exchange, and failing together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import gather_object

from draftsmith.errors import DraftsmithError
from draftsmith.parallel.ranks import process_count

# Processes meet at the beginning and at the end only, and one may be done days before another.
PATIENCE = timedelta(days=20)  # gloo counts milliseconds in 31 bits in places

T = TypeVar("T")


class Processes:
    """This process (`rank`) among `count`. Every process has to call the methods, in the same order."""

    def __init__(self, rank: int = 0, count: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.count = count
        self._group = group

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    def first(self, work: Callable[[], T]) -> T:
        """What `work` gives in the first process, which alone does it. A `DraftsmithError` there is raised in all."""
        result: T | None = None
        error: DraftsmithError | None = None
        if self.rank == 0:
            try:
                result = work()
            except DraftsmithError as raised:
                error = raised
        result, failure = self.gather((result, None if error is None else str(error)))[0]
        if error is not None:
            raise error
        if failure is not None:
            raise DraftsmithError(failure)
        return result  # type: ignore[return-value]


@contextmanager
def launched_processes() -> Iterator[Processes]:
    """The processes that a launcher has started, found through the address that it set; without a launcher, one."""
    if process_count() == 1:
        yield Processes()
        return
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", timeout=PATIENCE)
    group = None if own else dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), group)
    finally:
        if own:
            dist.destroy_process_group()


def raise_together(error: DraftsmithError | None) -> None:
    """Raise in every process what failed in one of them: none goes on to wait for one that is gone. All call it."""
    messages = [message for message in gather_object([str(error) if error is not None else None]) if message]
    if error is not None:
        raise error
    if messages:
        raise DraftsmithError(messages[0])
