"""Forward and backward of a micro-batch as a CUDA graph, for drafts so small that the host takes longer to launch
kernels than the device to compute them."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.base.graphs import GraphPool
from draftsmith.training.micro_batch import MicroBatch

Outcome = tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]
"""Numerator, denominator and metrics, as `DraftLoss` returns them."""

_log = logging.getLogger(__name__)

MOST_GRAPHS = 64
"""Shapes that are kept as graphs; batches of further ones run eagerly."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outcome: Outcome


class BatchGraphs:
    """Runs micro-batches forward and backward; from the second of a shape on by replaying a graph.

    forward: a module of one process, in which nothing waits for the device and nothing depends on the host's numbers
    but the shapes of the batch and the counts of its examples, which are rounded, so that few of them occur. All graphs
    share the memory of their intermediate results, and one gradient a parameter, which is in `.grad` after a replay;
    what a call returns may be overwritten by the next one of any shape.
    """

    def __init__(self, forward: Callable[[MicroBatch, Tensor], Outcome], parameters: Sequence[nn.Parameter]) -> None:
        self._forward = forward
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._pool = GraphPool()
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self._told = False

    def run(self, batch: MicroBatch, progress: Tensor) -> Outcome:
        """The outcome of the batch, detached; its gradients stand in the parameters' `.grad`, which were empty."""
        batch = replace(batch, examples=batch.examples.rounded())
        inputs = [*batch.tensors().values(), progress]
        key = (batch.examples.counts, *(tensor.shape for tensor in inputs))
        self._seen[key] += 1
        if key not in self._captured:
            full = len(self._captured) >= MOST_GRAPHS
            if full and not self._told:
                _log.warning("train.graphs: %d shapes have graphs; batches of others run eagerly", MOST_GRAPHS)
                self._told = True
            if full or self._seen[key] == 1:
                # A gradient is added up on the stream on which its parameter was first used, as long as anything keeps
                # that use (a GRU's list of its weights does). On the default stream a capture would forbid that. And
                # compiled code tells views from other tensors: it gets the kind that a capture has.
                own = batch if full else batch.mapped(torch.clone)
                return self._pool.warm_up(partial(self._eagerly, own, progress))
            self._captured[key] = self._capture(batch, progress)
        captured = self._captured[key]
        torch._foreach_copy_(captured.inputs, inputs, non_blocking=True)
        captured.graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return captured.outcome

    def _eagerly(self, batch: MicroBatch, progress: Tensor) -> Outcome:
        numerator, denominator, metrics = self._forward(batch, progress)
        numerator.backward()
        return numerator.detach(), denominator, metrics

    def _capture(self, batch: MicroBatch, progress: Tensor) -> _Captured:
        static, share = batch.mapped(torch.clone), progress.clone()
        inputs = [*static.tensors().values(), share]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        graph, outcome = self._pool.capture(partial(self._from_zero, static, share))
        return _Captured(graph, inputs, outcome)

    def _from_zero(self, batch: MicroBatch, progress: Tensor) -> Outcome:
        torch._foreach_zero_(self._gradients)
        return self._eagerly(batch, progress)
