"""One step of decoding for some slots: propose -> verify -> accept -> commit -> append context.

A step is a function of tensors on the device: it never waits for the host, and its shapes do not depend on values, so
that a graph can hold it. Decoding without a draft is the same step with nothing proposed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.algorithms.algorithm import Proposals, Proposer
from draftsmith.decoding.cache import BlockRunner
from draftsmith.decoding.pool import Slots
from draftsmith.decoding.rng import Stream, uniform_pair
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import RowSampling, SamplingBounds, distribution, draw_token
from draftsmith.decoding.state import DecodingState
from draftsmith.decoding.verify import Verdict, verify_chosen, verify_sampled
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target, TargetStates


@dataclass
class Drafting:
    """What proposes: a draft, who runs its blocks, and its method's proposer."""

    draft: Draft
    blocks: BlockRunner
    proposer: Proposer


@dataclass
class Stepper:
    """The models at work. width: tokens in one verify."""

    target: Target
    drafting: Drafting | None
    width: int

    @property
    def reach(self) -> int:
        """Cache positions from a row's anchor on that a step touches."""
        return self.width if self.drafting is None else max(self.width, self.drafting.draft.config.block_size)

    @torch.no_grad()
    def step(self, slots: Slots, extent: int, bounds: SamplingBounds) -> None:
        """One round for every slot, in place; slots without a row in work are computed along and nothing is committed
        to them. No row's anchor + `reach` exceeds `extent`."""
        state = slots.state
        sampling = state.sampling(bounds)
        proposals = self._propose(slots, extent, sampling)
        start = state.anchor
        positions = state.verify_positions(self.width, self.target.max_position_embeddings)
        ids = torch.cat((state.anchor_ids[:, None], proposals.token_ids), dim=1)  # [slots, w]
        states = self._run_target(slots, ids, positions, extent, final_state=True)
        verdict = self._verify(state, _present(states.final_state), proposals, sampling)
        state.commit(verdict)
        self._append_context(slots, states, start)

    @torch.no_grad()
    def prefill(self, slots: Slots, begin: int, width: int, ending: Tensor | None, bounds: SamplingBounds) -> None:
        """Runs `width` tokens of each slot's prompt, from position `begin` on, through target and draft.

        ending [slots] bool: rows whose prompt ends in this pass; they get their first token, and are in work from now
        on. None: there are none. Rows that end earlier are padded; what that leaves in the caches lies past the row's
        length and is overwritten in time.
        """
        state = slots.state
        positions = torch.arange(begin, begin + width, device=state.length.device).expand(len(state.length), -1)
        ids = state.tokens[:, begin : begin + width]
        states = self._run_target(slots, ids, positions, begin + width, final_state=ending is not None)
        self._append_context(slots, states, torch.full_like(state.length, begin))
        if ending is None:
            return
        final = _present(states.final_state)
        index = (state.anchor - begin).clamp(0, width - 1)
        last = final.gather(1, index.view(-1, 1, 1).expand(-1, 1, final.shape[-1]))  # [slots, 1, H]
        state.finished.logical_and_(~ending)
        chosen = self._choose(state, last, state.sampling(bounds))
        state.commit(Verdict(chosen, ending.long()))

    # --- the parts of a step ------------------------------------------------------------------------------------------

    def _propose(self, slots: Slots, extent: int, sampling: RowSampling) -> Proposals:
        """The next tokens as the draft sees them; without a draft, filler of which nothing is proposed."""
        state, drafting = slots.state, self.drafting
        if drafting is None or slots.context is None:
            filler = state.tokens.new_zeros(len(state.tokens), self.width - 1)
            return Proposals(filler, count=torch.zeros_like(state.length))
        config = drafting.draft.config
        # Block ids: the anchor, then masks (methods.md section 4).
        first = torch.arange(config.block_size, device=state.length.device) == 0
        ids = torch.where(first, state.anchor_ids[:, None], config.mask_token_id)  # [slots, B]
        embeddings = self.target.ends.embedding_rows(ids)
        hidden = drafting.blocks.block(embeddings, state.anchor, slots.context, extent)  # [slots, B, H]
        state.invalid_draft.logical_or_(~hidden.isfinite().flatten(1).all(-1) & ~state.finished)
        return drafting.proposer.propose(hidden, state.anchor_ids, RowSampler(sampling, state.seeds, state.anchor))

    def _run_target(
        self, slots: Slots, ids: Tensor, positions: Tensor, extent: int, *, final_state: bool
    ) -> TargetStates:
        """Target states of ids [slots, w] at positions [slots, w], all below `extent`, with the draft's taps."""
        tap_ids = () if self.drafting is None else self.drafting.draft.config.target_layer_ids
        cache = slots.target_cache.view(extent)
        return self.target.forward(ids, positions, tap_ids=tap_ids, final_state=final_state, cache=cache)

    def _append_context(self, slots: Slots, states: TargetStates, start: Tensor) -> None:
        if self.drafting is not None and slots.context is not None:
            self.drafting.blocks.append(_present(states.taps), start, slots.context)

    def _mark_invalid(self, state: DecodingState, finite: Tensor) -> None:
        """finite [slots, w]: whether the target's logits are."""
        state.invalid_target.logical_or_(~finite.all(-1) & ~state.finished)

    def _logits(self, state: DecodingState, final_state: Tensor) -> Tensor:
        """final_state [slots, w, H] -> logits [slots, w, V]; rows whose logits are not finite are marked."""
        logits = self.target.ends.project(final_state)
        self._mark_invalid(state, logits.amax(-1).isfinite())
        return logits

    def _choose(self, state: DecodingState, final_state: Tensor, sampling: RowSampling) -> Tensor:
        """The target's own token at each position: final_state [slots, w, H] -> [slots, w].

        Greedy rows take it from the same operation whether or not others draw, so that they get the same.
        """
        if not sampling.bounds.some_greedy:
            probabilities = distribution(self._logits(state, final_state), sampling)
            return draw_token(probabilities, self._noise(state, final_state.shape[1])[0])
        choice = self.target.ends.argmax(final_state)
        self._mark_invalid(state, choice.finite)
        if sampling.greedy:
            return choice.ids
        probabilities = distribution(self._logits(state, final_state), sampling)
        drawn = draw_token(probabilities, self._noise(state, final_state.shape[1])[0])
        return torch.where(sampling.greedy_rows[:, None], choice.ids, drawn)

    def _verify(
        self, state: DecodingState, final_state: Tensor, proposals: Proposals, sampling: RowSampling
    ) -> Verdict:
        if sampling.greedy or proposals.q is None:
            return verify_chosen(self._choose(state, final_state, sampling), proposals.token_ids, proposals.count)
        logits = self._logits(state, final_state)  # [slots, w, V]
        uniform, accept_uniform = self._noise(state, self.width)
        p = distribution(logits, sampling)
        drawn = verify_sampled(p, proposals.token_ids, proposals.q, proposals.count, uniform, accept_uniform)
        if not sampling.bounds.some_greedy:
            return drawn
        chosen = verify_chosen(self.target.ends.argmax(final_state).ids, proposals.token_ids, proposals.count)
        greedy = sampling.greedy_rows
        return Verdict(
            torch.where(greedy[:, None], chosen.token_ids, drawn.token_ids),
            torch.where(greedy, chosen.count, drawn.count),
        )

    def _noise(self, state: DecodingState, width: int) -> tuple[Tensor, Tensor]:
        """The numbers of the next `width` output positions, [slots, width] fp64 each (`Stream.TOKEN`)."""
        positions = state.length[:, None] + torch.arange(width, device=state.length.device)
        return uniform_pair(state.seeds[:, None], positions, Stream.TOKEN)


def _present(tensor: Tensor | None) -> Tensor:
    """A tensor that was asked for, and therefore is there."""
    assert tensor is not None
    return tensor
