"""Domino's block filled by keys: a step is a GRU cell, a latent and a search, none of which writes a vocabulary."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.algorithms.algorithm import Proposals, TokenSampler
from draftsmith.algorithms.rollout import Derived, RowSampling, VocabularyPart
from draftsmith.algorithms.search import Search
from draftsmith.blocks.layout import BlockLayout
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads.domino import DominoHead
from draftsmith.kernels.gru_cell import gru_cell, gru_cell_reference, token_table
from draftsmith.kernels.keys import key_ids
from draftsmith.kernels.prefix_latent import prefix_latent, prefix_latent_reference
from draftsmith.targets.ends import TargetEnds


@dataclass
class KeyedDominoProposer:
    """Fills the block left to right, each step from the key that the step before left in device memory.

    ends: the whole target's; part_ends: of the tokens that `search` covers. table: the GRU's input side of every token,
    [V, 3G], or None: read the embedding and multiply. kernels: run the Triton kernels, not their references.
    """

    draft: Draft
    ends: TargetEnds
    part_ends: TargetEnds
    layout: BlockLayout
    num_proposals: int
    search: Search
    table: Derived[Tensor] | None
    kernels: bool

    @classmethod
    def of(
        cls,
        draft: Draft,
        ends: TargetEnds,
        layout: BlockLayout,
        num_proposals: int,
        part: VocabularyPart,
        *,
        pruned: bool,
        with_table: bool,
        kernels: bool,
    ) -> "KeyedDominoProposer":
        """The proposer over this part of the vocabulary; builds the token table and the norms of W2's rows."""
        head = cast(DominoHead, draft.head)
        scale = draft.config.input_embedding_scale

        def weights() -> tuple[Tensor, ...]:
            return ends.embedding_weight, cast(Tensor, head.prefix_gru.weight_ih_l0)

        table = Derived(weights, lambda rows, weight: token_table(rows, weight, scale)) if with_table else None
        search = Search.of(lambda: head.output_weight, part, pruned=pruned, kernels=kernels)
        for derived in (table, search.norms):
            if derived is not None:
                derived()
        return cls(draft, ends, part.ends(ends), layout, num_proposals, search, table, kernels)

    @torch.no_grad()
    def propose(self, hidden: Tensor, anchor_ids: Tensor, sampler: TokenSampler) -> Proposals:
        """hidden [batch, B, H], anchor_ids [batch] -> token_ids [batch, P], with q [batch, P, V] when sampling."""
        head = cast(DominoHead, self.draft.head)
        slots = self.layout.predicting(hidden, dim=1)[:, : self.num_proposals]  # [batch, P, H]
        block = self.search.block(self.draft.logits(slots, self.part_ends), anchor_ids, cast(RowSampling, sampler))
        # W1 [h; s] = W1_h h + W1_s s, the first for all slots at once.
        for_hidden, for_state = cast(nn.Linear, head.embed_proj[0]).weight.split(
            (slots.shape[-1], head.prefix_gru.hidden_size), dim=1
        )
        from_hidden = functional.linear(slots, for_hidden)  # [batch, P, E]
        state = head.empty_prefix(slots[:, 0])  # [batch, G]
        for step in range(self.num_proposals):
            state = self._read(block.keys[step], state)
            latent = None
            if step >= head.pure_draft_prefix_len:
                latent = self._latent(from_hidden[:, step], for_state, state)
            block.choose(step, latent)
        return Proposals(block.token_ids(), block.distributions())

    def _read(self, keys: Tensor, state: Tensor) -> Tensor:
        gru = cast(DominoHead, self.draft.head).prefix_gru
        weight_hh = cast(Tensor, gru.weight_hh_l0)
        rows, weight_ih = self.ends.embedding_weight, cast(Tensor | None, gru.weight_ih_l0)
        if self.table is not None:
            rows, weight_ih = self.table(), None
        scale = self.draft.config.input_embedding_scale
        if not self.kernels:
            return gru_cell_reference(key_ids(keys), rows, weight_ih, weight_hh, state, scale)
        out = torch.empty_like(state)
        gru_cell(keys, rows, weight_ih, weight_hh, state, out, scale=scale)
        return out

    def _latent(self, from_hidden: Tensor, weight: Tensor, state: Tensor) -> Tensor:
        if not self.kernels:
            return prefix_latent_reference(from_hidden, weight, state)
        out = torch.empty_like(from_hidden, memory_format=torch.contiguous_format)
        prefix_latent(from_hidden, weight, state, out)
        return out
