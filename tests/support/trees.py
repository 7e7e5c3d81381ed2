"""Random trees of proposals, and what follows from their parents, spelt out."""

import torch
from torch import Tensor


def random_parents(batch: int, nodes: int, generator: torch.Generator) -> Tensor:
    """parents [batch, nodes] int64, -1 for children of the anchor: any parent that comes before, levels in order."""
    rows = []
    for _ in range(batch):
        parents: list[int] = []
        depths: list[int] = []
        while len(parents) < nodes:
            least = depths[-1] if depths else 1
            allowed = [p for p in range(-1, len(parents)) if (depths[p] if p >= 0 else 0) + 1 >= least]
            parent = allowed[int(torch.randint(len(allowed), (), generator=generator))]
            parents.append(parent)
            depths.append((depths[parent] if parent >= 0 else 0) + 1)
        rows.append(parents)
    return torch.tensor(rows)


def lineage(parents: list[int], node: int) -> list[int]:
    """The tokens of the path from the anchor (token 0) to a node's token (node + 1), both included."""
    path = []
    while node >= 0:
        path.append(node + 1)
        node = parents[node]
    return [0, *reversed(path)]


def depths_of(parents: Tensor) -> Tensor:
    """Of the anchor and the nodes: [batch, nodes] -> [batch, nodes + 1] int64."""
    return torch.tensor([[len(lineage(row, node)) - 1 for node in range(-1, len(row))] for row in parents.tolist()])
