"""The search for each step's token over a vocabulary, or over this process's part of one, by keys.

A `Search` belongs to a proposer; `Search.block` begins one block and gives a `BlockSearch`, whose `choose` finds one
step's token for all rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.algorithms.rollout import Derived, RowSampling, VocabularyPart
from draftsmith.kernels import low_rank_argmax as dense
from draftsmith.kernels import low_rank_pruning as pruning
from draftsmith.kernels.keys import key_ids, pack_keys
from draftsmith.kernels.noise import gumbel_noise


@dataclass
class Search:
    """Where a proposer looks for tokens: the correction's output matrix of its part of the vocabulary [n, E], and how.

    norms: of the matrix's rows, where rows that cannot win are not read. kernels: whether to run the Triton kernels or
    their PyTorch references.
    """

    weight: Derived[Tensor]
    norms: Derived[Tensor] | None
    part: VocabularyPart
    kernels: bool

    @classmethod
    def of(cls, weight: Tensor, part: VocabularyPart, *, pruned: bool, kernels: bool) -> "Search":
        """The search with a correction by `weight` [V, E], the whole vocabulary's."""
        own = Derived(lambda: (weight,), lambda whole: whole.detach()[part.first : part.last])
        norms = Derived(lambda: (own(),), pruning.row_norms) if pruned else None
        return cls(own, norms, part, kernels)

    def block(self, base: Tensor, anchor_ids: Tensor, sampler: RowSampling) -> "BlockSearch":
        """Begins a block: base [batch, P, n], the slots' logits; anchor_ids [batch] int64."""
        return BlockSearch(self, base, anchor_ids, sampler)


class BlockSearch:
    """One block in the making: `keys` [P + 1, batch], the anchor's and then each step's best."""

    def __init__(self, search: Search, base: Tensor, anchor_ids: Tensor, sampler: RowSampling) -> None:
        self.search, self.base, self.sampler = search, base, sampler
        batch, steps, _ = base.shape
        self.weight = search.weight()
        self.keys = dense.new_keys(steps + 1, batch, device=base.device)
        self.keys[0] = pack_keys(torch.zeros(1, device=base.device), anchor_ids)
        self.scores: Tensor | None = None
        self.candidates: Tensor | None = None
        if not sampler.sampling.greedy:
            self.scores = torch.empty(base.shape, dtype=torch.float32, device=base.device)
            self.temperature = torch.full((batch,), sampler.sampling.temperature, device=base.device)
        elif search.norms is not None:
            find = pruning.candidates if search.kernels else pruning.candidates_reference
            self.candidates = find(base.flatten(0, 1)).unflatten(0, (batch, steps))

    def choose(self, step: int, latent: Tensor | None, *, of_previous: bool = False) -> None:
        """Finds the tokens of `step` from base + W2 u: latent u [batch, E], or None without a correction; of_previous:
        latent is a table [V, E], and u its row of the token before."""
        previous = self.keys[step] if of_previous else None
        keys, base = self.keys[step + 1], self.base[:, step]
        weight = None if latent is None else self.weight
        if self.search.kernels:
            self._run_kernel(step, base, weight, latent, keys, previous)
        else:
            self._run_reference(step, base, weight, latent, keys, previous)
        self.search.part.exchange(keys)

    def token_ids(self) -> Tensor:
        """The block's tokens so far [batch, P] int64."""
        return key_ids(self.keys[1:]).T.contiguous()

    def distributions(self) -> Tensor | None:
        """What the tokens were drawn from [batch, P, V] fp32, or None for greedy ones."""
        return None if self.scores is None else self.search.part.gather(self.scores).softmax(-1)

    def _run_kernel(
        self, step: int, base: Tensor, weight: Tensor | None, latent: Tensor | None, keys: Tensor, previous: Tensor | None
    ) -> None:
        first = self.search.part.first
        if self.scores is not None:
            dense.low_rank_sample(
                base, weight, latent, keys, self.scores[:, step], temperature=self.temperature,
                seeds=self.sampler.seeds, positions=self.sampler.anchors, draw=step, previous=previous, first_id=first,
            )  # fmt: skip
        elif self.candidates is not None and self.search.norms is not None and weight is not None and latent is not None:
            pruning.pruned_low_rank_argmax(
                base, weight, latent, keys, norms=self.search.norms(), candidates=self.candidates[:, step],
                previous=previous, first_id=first,
            )  # fmt: skip
        else:
            # Every other step walks backwards: what the step before read last is still in the cache.
            dense.low_rank_argmax(
                base, weight, latent, keys, previous=previous, first_id=first, reverse=step % 2 == 1
            )  # fmt: skip

    def _run_reference(
        self, step: int, base: Tensor, weight: Tensor | None, latent: Tensor | None, keys: Tensor, previous: Tensor | None
    ) -> None:
        first = self.search.part.first
        if weight is None or latent is None:
            weight, latent = base.new_zeros(base.shape[1], 1), base.new_zeros(base.shape[0], 1)
        elif previous is not None:
            latent = latent[key_ids(previous)]
        if self.scores is not None:
            noise = gumbel_noise(self.sampler.seeds, self.sampler.anchors, step, base.shape[1], first)
            found, scores = dense.low_rank_sample_reference(base, weight, latent, noise, self.temperature, first)
            self.scores[:, step] = scores
        elif self.candidates is not None and self.search.norms is not None:
            found = pruning.pruned_low_rank_argmax_reference(
                base, weight, latent, self.search.norms(), self.candidates[:, step], first
            )
        else:
            found = dense.low_rank_argmax_reference(base, weight, latent, first)
        keys.copy_(found)
