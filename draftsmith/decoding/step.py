"""One step of decoding for some slots: propose -> verify -> accept -> commit -> update.

A step is a function of tensors on the device: it never waits for the host, and its shapes do not depend on values, so
that a graph can hold it. Decoding without a draft is the same step with nothing proposed.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from draftsmith.algorithms.drafter import AnyDrafter, Proposals, StatesWanted
from draftsmith.algorithms.registry import algorithm_for
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.pool import Slots
from draftsmith.decoding.rng import Stream, uniform_pair
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import RowSampling, SamplingBounds, distribution, draw_token
from draftsmith.decoding.state import row_sampling
from draftsmith.decoding.tree import Tree, along, states_along, walk
from draftsmith.decoding.verify import Verdict, verify_chosen, verify_sampled
from draftsmith.drafts.config import check_against_target
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.state.commit import commit
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.kernels.state.mark_not_finite import mark_not_finite
from draftsmith.kernels.state.open_step import open_step
from draftsmith.kernels.state.read_prompt import read_prompt
from draftsmith.targets.cache import TargetCache
from draftsmith.targets.ends import TokenChoice
from draftsmith.targets.target import Target, TargetStates

T = TypeVar("T")


@dataclass
class Stepper:
    """The models at work. plain_width: tokens in one target pass where nothing is drafted."""

    target: Target
    drafter: AnyDrafter | None
    plain_width: int = 1

    @classmethod
    def of(cls, target: Target, draft: Draft | None, options: EngineOptions) -> "Stepper":
        """With the drafter of the draft's method. Raises `DraftsmithError` when draft and target do not fit, and for
        options that do not apply."""
        if draft is None:
            _refuse_draft_options(options)
            return cls(target, None, options.verify_width or 1)
        check_against_target(draft.config, target.info)
        if options.verify_width is not None:
            raise DraftsmithError(
                f"verify_width is {options.verify_width}, but with a draft the width follows from the proposals; leave "
                "it out, or set num_proposals"
            )
        if draft.device != target.device:
            raise DraftsmithError(
                f"the draft is on {draft.device} and the target on {target.device}; load both on one device"
            )
        method = algorithm_for(draft.config)
        decoding = method.parse_decoding(options.proposer, options.num_proposals)
        return cls(target, method.drafter(draft, target.ends, decoding))

    @property
    def width(self) -> int:
        """Tokens in one verify."""
        return self.plain_width if self.drafter is None else self.drafter.width

    @property
    def reach(self) -> int:
        """Cache positions from a row's anchor on that a step touches."""
        return self.width if self.drafter is None else self.drafter.reach

    @torch.no_grad()
    def step(self, slots: Slots, extent: int, bounds: SamplingBounds) -> None:
        """One round for every slot, in place; slots without a row in work are computed along and nothing is committed
        to them. No row's anchor + `reach` exceeds `extent`."""
        state, sampling = slots.state, row_sampling(slots.state, bounds)
        window = self.target.max_position_embeddings
        if self.drafter is None:
            _, ids, positions, valid = open_step(state, width=self.width, own=1, num_ids=self.width, window=window)
            cache = slots.target_cache.view(extent)
            states = self._run_target(cache, ids, positions, valid, final_state=True, tentative=True)
            self._commit(state, _present(states.final_state), None, sampling)
            cache.keep(state.committed)
            return
        anchors, anchor, positions, valid = open_step(state, width=self.width, own=self.width, num_ids=1, window=window)
        sampler = RowSampler(sampling, state.seeds, anchors)
        proposals = self.drafter.propose(_present(slots.draft), anchors, anchor[:, 0], extent, sampler)
        if proposals.states is not None:
            mark_not_finite(state, proposals.states)
        ids = torch.cat((anchor, proposals.token_ids), dim=1)  # [slots, w]
        cache = slots.target_cache.view(extent)
        if proposals.parents is None:
            states = self._run_target(cache, ids, positions, valid, final_state=True, tentative=True)
            self._commit(state, _present(states.final_state), proposals, sampling)
            cache.keep(state.committed)
        else:
            tree = Tree.of(proposals.parents)
            positions, own = tree.positions(anchors, window), self.width * valid.clamp(max=1)
            states = self._run_target(
                cache, ids, positions, own, final_state=True, tentative=True, ancestors=tree.ancestors
            )
            path = self._commit_tree(state, _present(states.final_state), proposals, tree, sampling)
            cache.keep(state.committed, anchors[:, None] + path)
            ids, states = along(path, ids), states_along(path, states)
        self.drafter.update(_present(slots.draft), ids, states, anchors, state.committed)

    @torch.no_grad()
    def prefill(self, slots: Slots, width: int, extent: int, bounds: SamplingBounds | None) -> None:
        """Runs the next `width` tokens of each slot's prompt through target and draft. Every prompt is still being
        read, and no position after this pass exceeds `extent`.

        bounds: of the rows whose prompt ends in this pass; they get their first token, and are in work from now on.
        None: there are none. Rows that end earlier are padded, with tokens that are not their own.
        """
        state = slots.state
        ids, positions, valid = read_prompt(state, width)
        final_state = bounds is not None or self._wants.final_state
        cache = slots.target_cache.view(extent)
        states = self._run_target(cache, ids, positions, valid, final_state=final_state, tentative=False)
        if self.drafter is not None:
            self.drafter.read(_present(slots.draft), ids, states, state.read, valid)
        if bounds is not None:
            final = _present(states.final_state)
            ending = state.length - state.read <= width
            last = final.gather(1, (valid - 1).view(-1, 1, 1).expand(-1, 1, final.shape[-1]))  # [slots, 1, H]
            state.finished.logical_and_(~ending)
            choice = self._choose(state, last, row_sampling(state, bounds))
            commit(state, choice.ids, ending.long(), choice.finite)
        state.read.add_(width)

    # --- the parts of a step ------------------------------------------------------------------------------------------

    @property
    def _wants(self) -> StatesWanted:
        return StatesWanted() if self.drafter is None else self.drafter.wants

    def _run_target(
        self,
        cache: TargetCache,
        ids: Tensor,
        positions: Tensor,
        valid: Tensor,
        *,
        final_state: bool,
        tentative: bool,
        ancestors: Tensor | None = None,
    ) -> TargetStates:
        """Target states of ids [slots, w] at positions [slots, w], with those that the drafter wants. valid, tentative
        and ancestors: as for `Target.forward`."""
        return self.target.forward(
            ids,
            positions,
            tap_ids=self._wants.tap_ids,
            final_state=final_state,
            cache=cache,
            valid=valid,
            tentative=tentative,
            ancestors=ancestors,
        )

    def _choose(
        self, state: DecodingState, final_state: Tensor, sampling: RowSampling, depth: Tensor | None = None
    ) -> TokenChoice:
        """The target's own token at each position: final_state [slots, w, H] -> ids and finite [slots, w]. depth
        [slots, w] int64: how many output positions after the first each one stands (None: 0, 1, ...).

        Greedy rows take it from the same operation whether or not others draw, so that they get the same.
        """
        if sampling.greedy:
            return self.target.ends.argmax(final_state)
        logits = self.target.ends.project(final_state)  # [slots, w, V]
        drawn = draw_token(distribution(logits, sampling), self._noise(state, logits.shape[1], depth)[0])
        finite = logits.amax(-1).isfinite()
        if not sampling.bounds.some_greedy:
            return TokenChoice(drawn, finite)
        greedy, choice = sampling.greedy_rows[:, None], self.target.ends.argmax(final_state)
        return TokenChoice(torch.where(greedy, choice.ids, drawn), torch.where(greedy, choice.finite, finite))

    def _commit(
        self, state: DecodingState, final_state: Tensor, proposals: Proposals | None, sampling: RowSampling
    ) -> None:
        """Verifies and commits: final_state [slots, w, H]; proposals None: the next token only."""
        if proposals is None:
            choice = self._choose(state, final_state, sampling)
            count = None if self.width == 1 else torch.ones_like(state.length)
            commit(state, choice.ids, count, choice.finite)
        elif sampling.greedy or proposals.q is None:
            # The rule of `verify_chosen`, which the commit holds in one launch with all the rest.
            choice = self._choose(state, final_state, sampling)
            commit(state, choice.ids, proposals.count, choice.finite, proposed=proposals.token_ids)
        else:
            verdict, finite = self._verify_sampled(state, final_state, proposals, proposals.q, sampling)
            commit(state, verdict.token_ids, verdict.count, finite)

    def _commit_tree(
        self, state: DecodingState, final_state: Tensor, proposals: Proposals, tree: Tree, sampling: RowSampling
    ) -> Tensor:
        """Verifies a tree and commits: final_state [slots, w, H] -> the path [slots, w] int64 (`decoding.tree.Walk`).

        Raises `DraftsmithError` for proposals that were drawn: acceptance by their distribution is for chains.
        """
        if proposals.q is not None:
            raise DraftsmithError("the drafter draws a tree's tokens from a distribution; only chains may be drawn")
        choice = self._choose(state, final_state, sampling, tree.depth)
        walked = walk(choice.ids, proposals.token_ids, tree, proposals.count)
        beyond = torch.arange(self.width, device=state.length.device) >= walked.verdict.count[:, None]
        finite = along(walked.path, choice.finite) | beyond  # other nodes say nothing about the row
        commit(state, walked.verdict.token_ids, walked.verdict.count, finite)
        return walked.path

    def _verify_sampled(
        self, state: DecodingState, final_state: Tensor, proposals: Proposals, q: Tensor, sampling: RowSampling
    ) -> tuple[Verdict, Tensor]:
        """The verdict on proposals drawn from q [slots, P, V], and whether the logits were finite [slots, w]."""
        logits = self.target.ends.project(final_state)  # [slots, w, V]
        finite = logits.amax(-1).isfinite()
        uniform, accept_uniform = self._noise(state, self.width)
        p = distribution(logits, sampling)
        drawn = verify_sampled(p, proposals.token_ids, q, proposals.count, uniform, accept_uniform)
        if not sampling.bounds.some_greedy:
            return drawn, finite
        greedy, choice = sampling.greedy_rows, self.target.ends.argmax(final_state)
        chosen = verify_chosen(choice.ids, proposals.token_ids, proposals.count)
        verdict = Verdict(
            torch.where(greedy[:, None], chosen.token_ids, drawn.token_ids),
            torch.where(greedy, chosen.count, drawn.count),
        )
        return verdict, torch.where(greedy[:, None], choice.finite, finite)

    def _noise(self, state: DecodingState, width: int, depth: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The numbers of the next `width` output positions, or of those at depth [slots, width] int64 after the first,
        [slots, width] fp64 each (`Stream.TOKEN`)."""
        ahead = torch.arange(width, device=state.length.device) if depth is None else depth
        positions = state.length[:, None] + ahead
        return uniform_pair(state.seeds[:, None], positions, Stream.TOKEN)


def _present(part: T | None) -> T:
    """What was asked for, and therefore is there."""
    assert part is not None
    return part


def _refuse_draft_options(options: EngineOptions) -> None:
    for name, value in (("num_proposals", options.num_proposals), ("proposer", options.proposer or None)):
        if value is not None:
            raise DraftsmithError(f"{name} is {value!r}, but there is no draft to propose; leave it out")
