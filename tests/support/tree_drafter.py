"""Drafters that hand in trees: around a draft's own drafter, whose context they keep, with tokens of their own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.algorithms.drafter import AnyDrafter, Proposals, Sampler
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.request import Generation, Request
from draftsmith.targets.target import TargetStates

Nodes = tuple[list[int], list[int]]
"""Of one row: the tokens, and the parent of each (-1: the anchor)."""


class TreeDrafter:
    """Knows every prompt's answer: `grow(row, following)` makes the nodes of a row from what its answer goes on with.

    `inner` keeps the context: it reads what the target says of prompts and of paths. It looks at numbers of the device,
    so no graph can hold it.
    """

    def __init__(
        self, inner: AnyDrafter, answers: list[list[int]], nodes: int, grow: Callable[[int, list[int]], Nodes]
    ) -> None:
        self.inner, self.answers, self.nodes, self.grow = inner, answers, nodes, grow
        self.engine: Engine | None = None
        self.counts: Callable[[int], int] | None = None
        self.updates: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def wants(self) -> Any:
        return self.inner.wants

    @property
    def width(self) -> int:
        return self.nodes + 1

    @property
    def reach(self) -> int:
        return max(self.width, self.inner.reach)

    def new_state(self, slots: int, length: int) -> Any:
        return self.inner.new_state(slots, length)

    def read(self, state: Any, ids: Tensor, states: TargetStates, start: Tensor, valid: Tensor) -> None:
        self.inner.read(state, ids, states, start, valid)

    def update(self, state: Any, ids: Tensor, states: TargetStates, start: Tensor, count: Tensor) -> None:
        self.updates.append((ids.clone(), start.clone(), count.clone()))
        self.inner.update(state, ids, states, start, count)

    def propose(self, state: Any, anchors: Tensor, anchor_ids: Tensor, extent: int, sampler: Sampler) -> Proposals:
        assert self.engine is not None
        rows = []
        for slot, answer in enumerate(self.engine.scheduler.occupants[: len(anchors)]):
            row, done = (0, 0) if answer is None else (answer.index, int(anchors[slot]) + 1 - len(answer.prompt))
            rows.append(self.grow(row, self.answers[row][max(done, 0) :]))
        count = None if self.counts is None else torch.tensor([self.counts(slot) for slot in range(len(rows))])
        tokens, parents = (torch.tensor([row[part] for row in rows]) for part in (0, 1))
        return Proposals(tokens, parents=parents, count=count)


def two_chains(vocab_size: int, length: int, right: Callable[[int, int], tuple[bool, int]]) -> Any:
    """`grow` of two chains of `length` tokens each, in levels: `right(row, left)` says which of the two begins right
    (True: the second) and how many tokens of it are right; the other one begins with another token."""

    def grow(row: int, following: list[int]) -> Nodes:
        second, good = right(row, len(following))
        known = [following[i] if i < len(following) else 0 for i in range(length)]
        one = [token if i < good else (token + 1) % vocab_size for i, token in enumerate(known)]
        other = [(one[0] + 1 + i) % vocab_size if i == 0 else token for i, token in enumerate(known)]
        chains = (other, one) if second else (one, other)
        tokens = [chain[level] for level in range(length) for chain in chains]
        return tokens, [-1, -1, *range(2 * length - 2)]

    return grow


def decode_tree(engine: Engine, request: Request, drafter: TreeDrafter) -> list[Generation]:
    """`engine.decode` with this drafter."""
    engine.drafter = drafter
    drafter.engine = engine
    return engine.decode(request)


def reference_walk(chosen: Sequence[int], tokens: Sequence[int], parents: Sequence[int], count: int) -> list[int]:
    """The tokens of the path (0: the anchor), node by node."""
    path = [0]
    while True:
        here = path[-1]
        found = [node for node in range(count) if parents[node] + 1 == here and tokens[node] == chosen[here]]
        if not found:
            return path
        path.append(found[0] + 1)
