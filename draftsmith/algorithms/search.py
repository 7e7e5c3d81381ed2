"""The search for each step's token over a vocabulary, or over this process's part of one, by keys.

A `Search` belongs to a filler; `Search.block` begins one block and gives a `BlockSearch`, whose `choose` finds one
step's token for all rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.algorithms.drafter import Sampler
from draftsmith.algorithms.rollout import Derived, VocabularyPart
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.rollout import low_rank_argmax as dense
from draftsmith.kernels.rollout import low_rank_pruning as pruning
from draftsmith.kernels.rollout.block_keys import begin_keys, block_tokens
from draftsmith.kernels.rollout.row_bounds import RowBounds, row_bounds
from draftsmith.kernels.vocabulary.keys import key_ids, pack_keys
from draftsmith.kernels.vocabulary.noise import LEAST_TEMPERATURE, gumbel_noise

PRUNED_ROWS = 2
"""The most rows of a batch for which rows of W2 are left out: each is searched for itself, so that more take
longer than all together without bounds."""


@dataclass
class Search:
    """Where a filler looks for tokens: the correction's output matrix of its part of the vocabulary [n, E], and how.

    bounds: of the matrix's rows, where rows that cannot win are not read.
    """

    weight: Derived[Tensor]
    bounds: Derived[RowBounds] | None
    part: VocabularyPart

    @classmethod
    def of(cls, weight: Callable[[], Tensor], part: VocabularyPart, *, pruned: bool) -> "Search":
        """The search with a correction by `weight()` [V, E], the whole vocabulary's. Raises `DraftsmithError` for one
        too wide for the kernels."""
        _check_rank(weight(), pruned)
        own = Derived(lambda: (weight(),), lambda whole: whole.detach()[part.first : part.last])
        bounds = Derived(lambda: (own(),), row_bounds) if pruned else None
        return cls(own, bounds, part)

    def block(self, base: Tensor, anchor_ids: Tensor, sampler: Sampler) -> "BlockSearch":
        """Begins a block: base [batch, P, n], the slots' logits; anchor_ids [batch] int64."""
        return BlockSearch(self, base, anchor_ids, sampler)


def _check_rank(weight: Tensor, pruned: bool) -> None:
    if not uses_kernels(weight):
        return
    rank = weight.shape[1]
    if rank > dense.MAX_RANK:
        raise DraftsmithError(
            f"the head's correction has rank {rank}; kernels take up to {dense.MAX_RANK}: set rollout to 'plain'"
        )
    widest = pruning.widest_rank(weight.element_size(), weight.device)
    if pruned and rank > widest:
        raise DraftsmithError(
            f"the head's correction has rank {rank} in {weight.dtype}; on {weight.device} rollout 'pruned' takes up to "
            f"{widest}: set rollout to 'dense'"
        )


class BlockSearch:
    """One block in the making: `keys` [P + 1, batch], the anchor's and then each step's best."""

    def __init__(self, search: Search, base: Tensor, anchor_ids: Tensor, sampler: Sampler) -> None:
        self.search, self.base, self.sampler = search, base, sampler
        batch, steps, _ = base.shape
        self.weight = search.weight()
        self.keys = begin_keys(anchor_ids, steps)
        self.scores = None if sampler.greedy else torch.empty(base.shape, dtype=torch.float32, device=base.device)
        self.filtered_q: list[Tensor] = []
        self.leaders: pruning.Leaders | None = None
        if search.bounds is not None and batch <= PRUNED_ROWS and sampler.greedy:
            self.leaders = pruning.leaders(base.flatten(0, 1)).unflatten((batch, steps))

    def choose(self, step: int, latent: Tensor | None, *, of_previous: bool = False) -> None:
        """Finds the tokens of `step` from base + W2 u: latent u [batch, E], or None without a correction; of_previous:
        latent is a table [V, E], and u its row of the token before."""
        weight = None if latent is None else self.weight
        previous = self.keys[step] if of_previous else None
        self._search(step, weight, latent, previous)
        self.search.part.exchange(self.keys[step + 1])
        if self.scores is not None and self.sampler.filtered is not None:
            self._choose_filtered(step, self.scores[:, step], self.sampler.filtered)

    def guesses(self, count: int) -> Tensor:
        """Some of each step's likeliest tokens without correction [batch, P, count] int32."""
        if self.leaders is None:
            return pruning.leaders(self.base.flatten(0, 1)).firsts[:, :count].unflatten(0, self.base.shape[:2])
        return self.leaders.firsts[..., :count]

    def token_ids(self) -> Tensor:
        """The block's tokens [batch, P] int64."""
        return block_tokens(self.keys)

    def distributions(self) -> Tensor | None:
        """What the tokens were drawn from [batch, P, V] fp32, or None when all rows are greedy."""
        if self.scores is None:
            return None
        if self.filtered_q:
            return torch.stack(self.filtered_q, dim=1)
        scores = self.search.part.gather(self.scores)
        temperature = self.sampler.temperature.view(-1, 1, 1)
        scores = (scores - scores.amax(-1, keepdim=True)) / temperature.clamp(min=LEAST_TEMPERATURE)
        certain = torch.zeros_like(scores).scatter_(-1, self.token_ids().unsqueeze(-1), 1.0)
        return torch.where(temperature == 0.0, certain, scores.softmax(-1))

    def _choose_filtered(self, step: int, scores: Tensor, filtered: Tensor) -> None:
        """Draws again in rows with top-k or top-p, with the same noise, among the tokens that these leave."""
        sampler = self.sampler
        _, q = sampler(self.search.part.gather(scores), step)
        assert q is not None
        noise = gumbel_noise(sampler.seeds, sampler.anchors, step, q.shape[-1])
        ids = torch.arange(q.shape[-1], device=q.device)
        redrawn = pack_keys(q.log() + noise, ids).amax(-1)
        keys = self.keys[step + 1]
        keys.copy_(torch.where(filtered & (sampler.temperature > 0), redrawn, keys))
        # A row that takes its most likely token has all its mass there; the sampler's own choice may break a tie of
        # rounding differently.
        certain = torch.zeros_like(q).scatter_(-1, key_ids(keys)[:, None], 1.0)
        self.filtered_q.append(torch.where((sampler.temperature == 0)[:, None], certain, q))

    def _search(self, step: int, weight: Tensor | None, latent: Tensor | None, previous: Tensor | None) -> None:
        base, keys, search, sampler = self.base[:, step], self.keys[step + 1], self.search, self.sampler
        if self.scores is not None:
            draw = dense.Draw(sampler.temperature, sampler.seeds, sampler.anchors, step)
            dense.low_rank_sample(
                base, weight, latent, keys, self.scores[:, step], draw, previous=previous, first_id=search.part.first
            )
        elif self.leaders is None or search.bounds is None or weight is None or latent is None:
            # Every other step walks backwards: what the step before read last is still in the cache.
            dense.low_rank_argmax(
                base, weight, latent, keys, previous=previous, first_id=search.part.first, reverse=step % 2 == 1,
                overlap=step > 0,
            )  # fmt: skip
        else:
            # The first search waits for all that is made once a block; later ones read it before they wait.
            pruning.pruned_low_rank_argmax(
                base, weight, latent, keys, bounds=search.bounds(), leaders=self.leaders.of((slice(None), step)),
                previous=previous, first_id=search.part.first, overlap=step > 0,
            )  # fmt: skip
