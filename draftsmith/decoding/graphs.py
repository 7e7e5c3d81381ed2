"""Steps held in CUDA graphs: one for each shape that a step has, all in one pool of memory."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from draftsmith.base.graphs import GraphPool
from draftsmith.errors import DraftsmithError


class StepGraphs:
    """Runs steps by key; a step must do the same work on the same memory whenever it is run under one key.

    The first step of a key runs eagerly, on a stream beside: it is a step like any other, and warms up whatever a
    capture must not set up. The second is captured, which computes nothing, and replayed, as all later ones are. A
    graph keeps nothing but its own intermediate results, and replays follow each other, so all share one pool of
    memory, also with the graphs of `beside`, whose steps must run in turn with these.

    At most `max_graphs` are kept, and as many keys that were met once; of both, the longest unused goes first, and is
    new when it is met again. So keys that come round too seldom to be kept are never captured, and cost what they
    would without graphs.
    """

    def __init__(self, device: torch.device, max_graphs: int, beside: "StepGraphs | None" = None) -> None:
        self._device = device
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._warm: OrderedDict[Hashable, None] = OrderedDict()
        self._pool: GraphPool = GraphPool(device) if beside is None else beside._pool
        self.prepared = 0
        """Grows with every capture, and with every step that is warmed up while there is room for its key and graph:
        without, eager steps are what is to be expected."""

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """One step, on the current stream as far as the caller can tell."""
        graph = self._graphs.get(key)
        if graph is None and key not in self._warm:
            self._note(key)
            self._pool.warm_up(step)
            return
        if graph is None:
            graph = self._capture(key, step)
        self._graphs.move_to_end(key)
        graph.replay()

    def _note(self, key: Hashable) -> None:
        if len(self._warm) >= self._max_graphs:
            self._warm.popitem(last=False)
        elif len(self._graphs) < self._max_graphs:
            self.prepared += 1
        self._warm[key] = None

    def _capture(self, key: Hashable, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if len(self._graphs) >= self._max_graphs:
            torch.cuda.synchronize(self._device)  # the graph may still be running
            _, oldest = self._graphs.popitem(last=False)
            oldest.reset()
        try:
            graph, _ = self._pool.capture(step)
        except RuntimeError as error:
            raise DraftsmithError(
                f"a decoding step cannot be captured in a CUDA graph: {error}; set graphs to off to decode eagerly"
            ) from error
        self._graphs[key] = graph
        del self._warm[key]
        self.prepared += 1
        return graph
