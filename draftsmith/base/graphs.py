"""CUDA graphs that share one pool of memory: warming up, and capturing on a stream of their own."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class GraphPool:
    """Makes graphs whose intermediate results lie in one pool of memory, so that replays of all must follow each other.

    device: None, the current one. Work is warmed up and captured on a stream beside the caller's, as captures have to
    be; as far as the caller can tell, both happen on its own.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._memory: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, work: Callable[[], T]) -> T:
        """Does the work eagerly. What it needs for the first time (compiled code, kernels) must exist before a
        capture, and so must what belongs to the stream of its first use."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = work()
        here.wait_stream(self._stream)
        return result

    def capture(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of the work, which computes nothing yet, and the tensors that its replays will write."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy to the device meanwhile; what they do is none of the graph's business.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        return graph, result
