"""Domino's block filled by keys: a step is a GRU cell, a latent and a search, none of which writes a vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.algorithms.block_drafter import Filler
from draftsmith.algorithms.drafter import Proposals, Sampler
from draftsmith.algorithms.rollout import Derived, VocabularyPart
from draftsmith.algorithms.search import BlockSearch, Search
from draftsmith.blocks.layout import BlockLayout
from draftsmith.drafts.draft import Draft
from draftsmith.drafts.heads.domino import DominoHead
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.device import uses_kernels
from draftsmith.kernels.rollout.input_gates import guessing_pays, input_gates, token_table
from draftsmith.kernels.rollout.prefix_gru import MAX_WIDTH, advance, start
from draftsmith.kernels.vocabulary.few_states import head_logits
from draftsmith.kernels.vocabulary.keys import token_keys
from draftsmith.targets.ends import TargetEnds

GUESSES = 4
"""Tokens guessed for each step."""


@dataclass
class KeyedDominoFiller(Filler[DominoHead]):
    """Fills the block left to right, each step from the key that the step before left in device memory.

    ends: the whole target's. part_ends: of the tokens that `search` covers. table: the GRU's input side of every token,
    [V, 3G], or None: read the embedding and multiply.
    """

    part_ends: TargetEnds
    search: Search
    table: Derived[Tensor] | None

    @classmethod
    def of(
        cls,
        draft: Draft[DominoHead],
        ends: TargetEnds,
        layout: BlockLayout,
        num_proposals: int,
        part: VocabularyPart,
        *,
        pruned: bool,
        with_table: bool,
    ) -> "KeyedDominoFiller":
        """The filler over this part of the vocabulary; builds the token table and the bounds of W2's rows. Raises
        `DraftsmithError` for a head that the kernels cannot hold."""
        head = draft.head
        if uses_kernels(head.output_weight) and head.prefix_gru.hidden_size > MAX_WIDTH:
            raise DraftsmithError(
                f"domino's GRU has {head.prefix_gru.hidden_size} units; kernels take up to {MAX_WIDTH}: set rollout to "
                "'plain'"
            )
        scale = draft.config.input_embedding_scale

        def weights() -> tuple[Tensor, ...]:
            return ends.embedding_weight, head.prefix_gru.weight_ih_l0

        table = Derived(weights, lambda rows, weight: token_table(rows, weight, scale)) if with_table else None
        search = Search.of(lambda: head.output_weight, part, pruned=pruned)
        for derived in (table, search.bounds):
            if derived is not None:
                derived()
        return cls(draft, ends, layout, num_proposals, part.ends(ends), search, table)

    @torch.no_grad()
    def fill(self, hidden: Tensor, anchor_ids: Tensor, sampler: Sampler) -> Proposals:
        """As in `Filler`."""
        head = self.draft.head
        slots = self.predicting(hidden).contiguous()  # [batch, P, H]
        base = self.draft.logits(slots, self.part_ends, head_logits)
        block = self.search.block(base, anchor_ids, sampler)
        width = head.prefix_gru.hidden_size
        # W1 [h; s] = W1_h h + W1_s s, the first for all slots at once.
        for_hidden, for_state = head.latent_weight.split((slots.shape[-1], width), dim=1)
        from_hidden = functional.linear(slots, for_hidden)  # [batch, P, E]
        state, gates = start(len(slots), width, slots.dtype, slots.device)  # [batch, G], and W_h s [batch, 3G]
        guesses = self._guess(block, anchor_ids)
        for step in range(self.num_proposals):
            keys, of_slot = block.keys[step], from_hidden[:, step]
            known = None if guesses is None else (guesses[0][:, step], guesses[1][:, step])
            state, latent, gates = self._advance(keys, known, gates, state, of_slot, for_state)
            block.choose(step, latent if step >= head.pure_draft_prefix_len else None)
        return Proposals(block.token_ids(), block.distributions())

    def _guess(self, block: BlockSearch, anchor_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Tokens [batch, P, M] that each step may read, and W_i x of them [batch, P, M, 3G] fp32: one pass over W_i
        for all steps. Step 0 reads the anchor; the others, mostly, one of the likeliest by base logits."""
        if self.table is not None or not guessing_pays(block.keys[0]) or block.search.part.parts > 1:
            return None  # of a shared vocabulary, a process sees a part of the logits only
        tokens = torch.cat((anchor_ids.view(-1, 1, 1).expand(-1, 1, GUESSES), block.guesses(GUESSES)[:, :-1]), dim=1)
        return tokens, self._input_gates(token_keys(tokens.flatten()), None).sum(0).view(*tokens.shape, -1)

    def _input_gates(self, keys: Tensor, known: tuple[Tensor, Tensor] | None) -> Tensor:
        weight = self.draft.head.prefix_gru.weight_ih_l0
        scale = self.draft.config.input_embedding_scale
        return input_gates(keys, self.ends.embedding_weight, weight, scale=scale, guesses=known)

    def _advance(
        self,
        keys: Tensor,
        known: tuple[Tensor, Tensor] | None,
        gates: Tensor,
        state: Tensor,
        from_hidden: Tensor,
        for_state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reads the token of `keys` [batch]: the state after it, the latent, and W_h times that state."""
        gru = self.draft.head.prefix_gru
        weight_hh = gru.weight_hh_l0
        if self.table is None:
            return advance(self._input_gates(keys, known), gates, state, from_hidden, for_state, weight_hh)
        return advance(self.table(), gates, state, from_hidden, for_state, weight_hh, previous=keys)
