"""Who sees whom: the one rule by which attention is masked, in training, in verifies and in a draft's blocks.

New tokens come in blocks: the slots of a draft's block, the tokens of a verify, a chunk of a prompt. A query of a block
sees keys of two runs: its text's context, which ends before the block, and the block itself. A layer's pattern narrows
both: with a window W only keys less than W positions away are seen, either way; causal queries see none after their
own. In a tree a query sees, of its block, its ancestors and itself (`ancestors`).

Everything else follows from here: dense masks, tiles of flex_attention, and the kernels, which compute the same bounds
on the device and are tested against this file.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_TREE = 64
"""Most tokens of a block that is a tree: one bit of an int64 each."""


@dataclass(frozen=True)
class Visibility:
    """The keys that each query sees: two runs, first index and end, each [R, Q] int64.

    Queries are those of a row, block after block; keys are numbered 0 .. num_keys - 1. An empty run has its end at or
    before its first index. ancestors [R, Q] int64, None where blocks are no trees: of the second run only keys whose
    bit is set are seen, bit 0 for the run's first key.
    """

    context_first: Tensor
    context_end: Tensor
    block_first: Tensor
    block_end: Tensor
    num_keys: int
    ancestors: Tensor | None = None

    @classmethod
    def of(
        cls,
        *,
        begin: Tensor,
        end: Tensor,
        anchor: Tensor,
        depth: Tensor,
        own: Tensor,
        size: Tensor | int,
        num_keys: int,
        causal: bool,
        window: int | None,
        ancestors: Tensor | None = None,
    ) -> "Visibility":
        """What the queries of some blocks see under one pattern; all tensors int64, which broadcast to [R, ...].

        begin, end: first index and end of the context's keys. anchor: where the block's first query stands in the
        context's numbering; depth: how many positions behind it each query stands. own: index of the block's first key;
        size: keys of the block. ancestors: as in the class, of all the block's keys (one block a row).
        """
        place = anchor + depth
        context_first, block_first = begin, own
        block_end = own + depth + 1 if causal and ancestors is None else own + size
        if window is not None:
            context_first = torch.maximum(begin, place - (window - 1))
            if ancestors is None:
                block_first = own + (depth - (window - 1)).clamp(min=0)
                block_end = torch.minimum(block_end, own + depth + window)
            else:
                ancestors = ancestors & _bits(depth[:, :, None] - depth[:, None] < window)
        bounds = torch.broadcast_tensors(context_first, end, block_first, block_end, place)
        first, last, own_first, own_last = (bound.flatten(1) for bound in bounds[:4])
        return cls(first, last, own_first, own_last, num_keys, ancestors)

    @classmethod
    def over_cache(
        cls,
        places: Tensor,
        num_keys: int,
        *,
        causal: bool,
        window: int | None,
        ancestors: Tensor | None = None,
        depth: Tensor | None = None,
    ) -> "Visibility":
        """One block a row, whose own keys lie in a cache of `num_keys` entries behind their context.

        places [R, w] int64: where each query stands among the entries, never falling; the context are all entries
        before the first. In a tree, whose tokens lie one after the other, depth [R, w] int64 counts the ancestors of
        each but the block's first, which all descend from.
        """
        anchor = places[:, :1]
        zero = torch.zeros_like(anchor)
        if depth is None:
            depth = places - anchor
        size = depth[:, -1:] + 1 if ancestors is None else places.shape[1]
        return cls.of(
            begin=zero, end=anchor, anchor=anchor, depth=depth, own=anchor, size=size, num_keys=num_keys,
            causal=causal, window=window, ancestors=ancestors,
        )  # fmt: skip

    def runs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four bounds, in the order of the fields."""
        return self.context_first, self.context_end, self.block_first, self.block_end

    def sees(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The predicate, for index tensors that broadcast together -> bool."""
        in_context = (key >= self.context_first[row, query]) & (key < self.context_end[row, query])
        first = self.block_first[row, query]
        in_block = (key >= first) & (key < self.block_end[row, query])
        if self.ancestors is not None:
            bit = (key - first).clamp(0, MAX_TREE - 1)
            in_block = in_block & ((self.ancestors[row, query] >> bit) & 1).bool()
        return in_context | in_block

    def mask(self) -> Tensor:
        """[R, 1, Q, num_keys] bool, True where the query sees the key."""
        rows, queries = self.context_end.shape
        device = self.context_end.device
        row = torch.arange(rows, device=device).view(-1, 1, 1, 1)
        query = torch.arange(queries, device=device).view(1, 1, -1, 1)
        key = torch.arange(self.num_keys, device=device).view(1, 1, 1, -1)
        return self.sees(row, query, key)


@dataclass(frozen=True, eq=False)
class CachePattern:
    """Who sees whom in a pass over a cache, for all its layers of one pattern.

    start [batch] int, the position of each row's first query (query i stands at start + i), or [batch, w] int, the
    position of every query (none below the one before it). causal: a query sees keys at positions up to its own;
    otherwise up to the row's last query (a block that sees itself both ways). window W: only positions nearer than W.
    ancestors [batch, w] int64, w <= `MAX_TREE`: the queries are a tree, whose keys lie one after the other from
    start[:, 0] on; of these, query i sees those whose bit is set in ancestors[:, i] (`ancestors_of`), and start[:, i]
    is start[:, 0] plus its depth.
    """

    start: Tensor
    causal: bool
    window: int | None = None
    ancestors: Tensor | None = None
    _masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict, repr=False)

    def mask(self, width: int, length: int, groups: int = 1) -> Tensor:
        """[batch, 1, groups * width, length] bool, True where a query may look; `groups` repeats the queries. Made
        once, for all layers that ask."""
        key = (width, length, groups)
        if key not in self._masks:
            places = self.start
            if places.dim() == 1:
                places = places[:, None] + torch.arange(width, device=places.device)
            seen = Visibility.over_cache(
                places.long(), length, causal=self.causal, window=self.window, ancestors=self.ancestors
            )
            self._masks[key] = seen.mask().repeat(1, 1, groups, 1)
        return self._masks[key]


def ancestors_of(parents: Tensor) -> Tensor:
    """The bit masks of a tree's tokens: parents [batch, N] int64, -1 for children of the first token -> [batch, N + 1]
    int64, bit j of entry i set where token i is token j or descends from it (token 0 is the first, token i + 1 the one
    with parent parents[:, i])."""
    masks = [torch.ones_like(parents[:, 0])]
    for index in range(parents.shape[1]):
        above = torch.stack(masks, dim=1).gather(1, parents[:, index : index + 1] + 1)[:, 0]
        masks.append(above | (1 << (index + 1)))
    return torch.stack(masks, dim=1)


def _bits(flags: Tensor) -> Tensor:
    """flags [..., n] bool, n <= 64 -> [...] int64 with bit j of each from entry j."""
    return (flags.long() << torch.arange(flags.shape[-1], device=flags.device)).sum(-1)
