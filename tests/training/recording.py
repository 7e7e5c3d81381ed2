"""CUDA graphs where there is no CUDA: the operations of a capture are noted down and done again, in the same tensors.

As with a CUDA graph, what the host computed during the capture is frozen, and only tensors that change count.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Recording(TorchDispatchMode):
    """Stands in for `torch.cuda.CUDAGraph`; records while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if not any(value.alias_info is not None and not value.alias_info.is_write for value in returns):  # not a view
            # Without their history, which forbids to write into some of them.
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))
            self.done.append((func, args, kwargs, [tensor.detach() for tensor in _tensors(result)]))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self.done:
            for old, new in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # else done in place, or a view that its schema does not call one
                    old.copy_(new)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class OnlyStream:
    """Stands in for `torch.cuda.Stream`: work on a CPU is done in its order."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Let `torch.cuda`'s graphs be recordings; returns those that were made, as they are made."""
    made: list[Recording] = []

    def graph() -> Recording:
        made.append(Recording())
        return made[-1]

    @contextmanager
    def recorded(recording: Recording, **_: Any) -> Iterator[None]:
        with recording:
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", OnlyStream)
    monkeypatch.setattr(torch.cuda, "current_stream", OnlyStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return made
