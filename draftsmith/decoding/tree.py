"""Verifying a tree of proposals: which path of it the target takes.

The anchor is token 0 of the verify and the root; proposal i is token i + 1, and stands behind its parent. Parents come
before their children, and siblings are different tokens. The target chooses one token at every node, greedily or by one
draw with the noise of the node's output position; the path goes on to the child that is that token, and ends where
there is none. So what is committed are the choices of plain decoding, whatever proposed the nodes: the output is that
of `verify_chosen` for chains, token by token, as long as the proposals did not use the target's noise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decoding.verify import Verdict
from draftsmith.kernels.attention.visibility import ancestors_of
from draftsmith.targets.target import TargetStates


@dataclass(frozen=True)
class Tree:
    """The shape of each row's tree of w = N + 1 tokens.

    parents [batch, N] int64: the proposal that each one follows, -1 for the anchor; ancestors [batch, w] int64: bit
    masks of each token's path, itself included; depth [batch, w] int64: tokens between it and the anchor, which has 0.
    """

    parents: Tensor
    ancestors: Tensor
    depth: Tensor

    @classmethod
    def of(cls, parents: Tensor) -> "Tree":
        """The tree of these parents."""
        ancestors = ancestors_of(parents)
        bits = torch.arange(ancestors.shape[1], device=parents.device)
        depth = ((ancestors[..., None] >> bits) & 1).sum(-1) - 1
        return cls(parents, ancestors, depth)

    def positions(self, anchors: Tensor, window: int) -> Tensor:
        """Where the tokens stand in their texts [batch, w] int64: anchors [batch] int64; none past window - 1."""
        return (anchors[:, None] + self.depth).clamp(max=window - 1)


@dataclass(frozen=True)
class Walk:
    """verdict: as for a chain; path [batch, w] int64: the tokens on the way, from the anchor on, of which the first
    `verdict.count` count, and rise."""

    verdict: Verdict
    path: Tensor


def walk(chosen: Tensor, proposed: Tensor, tree: Tree, proposed_count: Tensor | None) -> Walk:
    """The path that the target takes.

    chosen [batch, w] int64: its token after each of the tree's tokens; proposed [batch, N] int64; proposed_count
    [batch] int64 or None: how many of them, from the first on, are proposed at all. Of equal siblings the first one is
    taken.
    """
    nodes = proposed.shape[1]
    index = torch.arange(nodes, device=proposed.device)
    right = chosen.gather(1, tree.parents + 1) == proposed  # [batch, N]
    if proposed_count is not None:
        right = right & (index < proposed_count[:, None])
    same = (tree.parents[:, :, None] == tree.parents[:, None]) & (proposed[:, :, None] == proposed[:, None])
    right = right & ~(same & (index < index[:, None])).any(-1)  # not after an equal sibling
    # A token is on the path when all of its ancestors, and itself, are what was chosen at their parents.
    chosen_tokens = 1 + (right.long() << (index + 1)).sum(1)  # [batch] bits, the anchor's among them
    taken = (tree.ancestors & ~chosen_tokens[:, None]) == 0  # [batch, w]
    path = torch.argsort((~taken).byte(), dim=1, stable=True)
    return Walk(Verdict(chosen.gather(1, path), taken.sum(1)), path)


def along(path: Tensor, values: Tensor) -> Tensor:
    """values [batch, w, ...] of the verify's tokens -> the same, in the order of path [batch, w]."""
    return values.gather(1, path.view(*path.shape, *[1] * (values.dim() - 2)).expand_as(values))


def states_along(path: Tensor, states: TargetStates) -> TargetStates:
    """A verify's states in the order of path [batch, w]."""
    taps, final = (None if each is None else along(path, each) for each in (states.taps, states.final_state))
    return TargetStates(taps, final)
