"""The decoding engine: prefill, then steps of propose -> verify -> accept -> commit -> append context.

A step is a function of tensors on the device: it never waits for the host, and its shapes do not depend on values, so
that a graph can hold it. The host looks at the finished flags between steps. Decoding without a draft is the same
engine with nothing proposed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.algorithms.algorithm import Proposals, Proposer
from draftsmith.algorithms.registry import algorithm_for
from draftsmith.decoding.cache import ContextCache, block_attention
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.rng import Stream, uniform_pair
from draftsmith.decoding.sampling import SamplingOptions, distribution, draw_token
from draftsmith.decoding.state import DecodingState, new_state
from draftsmith.decoding.verify import Verdict, verify_chosen, verify_sampled
from draftsmith.drafts.config import check_against_target
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.cache import KeyValueCache
from draftsmith.targets.target import Target, TargetStates


@dataclass
class Decoding:
    """A batch in the making: its request, its state on the device, and the caches of its rows.

    `reach` is the host's bound on the rows' lengths: no row is longer, so no cache is read further.
    """

    request: Request
    state: DecodingState
    target_cache: KeyValueCache
    context: ContextCache | None
    reach: int


class Engine:
    """Decodes ragged batches with a target and, perhaps, a draft; holds no state of any batch.

    `decode` runs a request to its end; `start`, `step`, `finished` and `results` are its parts. Raises
    `DraftsmithError` at construction when draft and target do not fit, or an option does not apply.
    """

    def __init__(self, target: Target, draft: Draft | None = None, options: EngineOptions | None = None) -> None:
        self.target = target
        self.draft = draft
        self.options = options or EngineOptions()
        self.proposer: Proposer | None = None
        if draft is None:
            self._refuse_draft_options()
            self.width = self.options.verify_width or 1
        else:
            self._check(draft)
            method = algorithm_for(draft.config)
            self.proposer = method.proposer(draft, target.ends, self.options.num_proposals, **self.options.proposer)
            self.width = method.block_layout(draft.config).verify_width(self.proposer.num_proposals)

    def decode(self, request: Request) -> list[Generation]:
        """Runs a request: one `Generation` a prompt, in order. Errors as in `start` and `finished`."""
        if not request.prompts:
            return []
        decoding = self.start(request)
        while not self.finished(decoding):
            self.step(decoding)
        return self.results(decoding)

    @torch.no_grad()
    def start(self, request: Request) -> Decoding:
        """Prefills the prompts and commits each row's first token.

        Raises `DraftsmithError` before any work for prompts that the models cannot take.
        """
        window = self.target.max_position_embeddings
        draft_positions = None if self.draft is None else self.draft.config.max_position_embeddings
        request.check(vocab_size=self.target.vocab_size, window=window, draft_positions=draft_positions)
        state = new_state(request, window, self.width, self.target.device)
        batch, max_length = len(request.prompts), state.tokens.shape[1] - self.width
        context = None if self.draft is None else ContextCache(self.draft, batch, max_length)
        longest = max(len(prompt) for prompt in request.prompts)
        decoding = Decoding(request, state, self.target.new_cache(batch, max_length), context, longest)

        last_state = self._prefill(decoding)  # [batch, H]
        chosen = self._choose(self._logits(state, last_state[:, None]), state, request.sampling)
        state.commit(Verdict(chosen, torch.ones_like(state.length)))
        decoding.reach += 1
        return decoding

    @torch.no_grad()
    def step(self, decoding: Decoding) -> None:
        """One round for every row, in place; finished rows are computed along and not changed."""
        state = decoding.state
        extent = self._extent(decoding)
        proposals = self._propose(decoding, extent)
        positions = state.verify_positions(self.width)
        block = torch.cat((state.anchor_ids[:, None], proposals.token_ids), dim=1)  # [batch, w]
        states = self._run_target(decoding, block, positions, extent, final_state=True)
        verdict = self._verify(decoding, _present(states.final_state), proposals)
        state.record(state.commit(verdict))
        self._append_context(decoding, states, positions)
        decoding.reach += self.width

    def finished(self, decoding: Decoding) -> bool:
        """Whether all rows are done: the one place where the host waits for the device.

        Raises `DraftsmithError` when a row met numbers that are not finite.
        """
        state = decoding.state
        flags = (state.finished.all(), state.invalid_target.any(), state.invalid_draft.any(), state.length.max())
        done, invalid_target, invalid_draft, decoding.reach = torch.stack(flags).tolist()
        if invalid_target or invalid_draft:
            part, rows = "target's logits", state.invalid_target
            if not invalid_target:
                part, rows = "draft's hidden states", state.invalid_draft
            raise DraftsmithError(
                f"the {part} are NaN or infinite for prompts {rows.nonzero()[:, 0].tolist()}; check the weights, or "
                f"use a wider dtype than {self.target.dtype}"
            )
        return bool(done)

    def results(self, decoding: Decoding) -> list[Generation]:
        """What every row has so far."""
        state = decoding.state
        tokens, lengths, stopped = state.tokens.tolist(), state.length.tolist(), state.stopped.tolist()
        history, verifies = state.accept_lengths.tolist(), state.verifies.tolist()
        return [
            Generation(
                token_ids=tokens[row][len(prompt) : lengths[row]],
                accept_lengths=history[row][: verifies[row]],
                finish_reason="stop" if stopped[row] else "length",
            )
            for row, prompt in enumerate(decoding.request.prompts)
        ]

    # --- the parts of a step ------------------------------------------------------------------------------------------

    def _prefill(self, decoding: Decoding) -> Tensor:
        """Runs the prompts chunk by chunk through target and context: the final state of each row's last token,
        [batch, H].

        Rows are right-padded; what padding leaves in the caches lies past the row's length and is overwritten in time.
        """
        state = decoding.state
        lengths = [len(prompt) for prompt in decoding.request.prompts]
        batch, longest = len(lengths), max(lengths)
        last = state.prompt_length - 1
        last_state: Tensor | None = None
        for begin in range(0, longest, self.options.prefill_chunk):
            end = min(begin + self.options.prefill_chunk, longest)
            positions = torch.arange(begin, end, device=last.device).expand(batch, -1)
            ends_here = any(begin < length <= end for length in lengths)
            states = self._run_target(decoding, state.tokens[:, begin:end], positions, end, final_state=ends_here)
            self._append_context(decoding, states, positions)
            if ends_here:
                final = _present(states.final_state)
                index = (last - begin).clamp(0, end - begin - 1)
                here = final.gather(1, index.view(-1, 1, 1).expand(-1, 1, final.shape[-1]))[:, 0]
                inside = ((begin <= last) & (last < end))[:, None]
                last_state = here if last_state is None else torch.where(inside, here, last_state)
        return _present(last_state)

    def _extent(self, decoding: Decoding) -> int:
        """How many cache positions a step may touch, in whole buckets so that shapes seldom change."""
        bucket = self.options.context_bucket
        needed = decoding.reach + self.width - 1
        return min(-(-needed // bucket) * bucket, decoding.target_cache.max_length)

    def _propose(self, decoding: Decoding, extent: int) -> Proposals:
        """The next tokens as the draft sees them; without a draft, filler of which nothing is proposed."""
        state = decoding.state
        if self.draft is None or self.proposer is None or decoding.context is None:
            filler = state.tokens.new_zeros(len(state.tokens), self.width - 1)
            return Proposals(filler, count=torch.zeros_like(state.length))
        block_size = self.draft.config.block_size
        slots = torch.arange(block_size, device=state.length.device)
        # Block ids: the anchor, then masks (methods.md section 4).
        ids = torch.where(slots == 0, state.anchor_ids[:, None], self.draft.config.mask_token_id)  # [batch, B]
        hidden = self.draft(
            self.target.ends.embedding_rows(ids)[:, None],
            (state.anchor[:, None] + slots)[:, None],
            decoding.context.view(extent),
            block_attention(state.anchor, extent, block_size, self.draft.attention_kinds),
        )[:, 0]  # [batch, B, H]
        state.invalid_draft.logical_or_(~hidden.isfinite().all(-1).all(-1) & ~state.finished)
        sampler = RowSampler(decoding.request.sampling, state.seeds, state.anchor)
        return self.proposer.propose(hidden, state.anchor_ids, sampler)

    def _run_target(
        self, decoding: Decoding, ids: Tensor, positions: Tensor, extent: int, *, final_state: bool
    ) -> TargetStates:
        """Target states of ids [batch, w] at positions [batch, w], all below `extent`, with the draft's taps."""
        tap_ids = () if self.draft is None else self.draft.config.target_layer_ids
        cache = decoding.target_cache.view(extent)
        return self.target.forward(ids, positions, tap_ids=tap_ids, final_state=final_state, cache=cache)

    def _append_context(self, decoding: Decoding, states: TargetStates, positions: Tensor) -> None:
        if decoding.context is not None:
            decoding.context.append(_present(states.taps), positions)

    def _logits(self, state: DecodingState, final_state: Tensor) -> Tensor:
        """final_state [batch, w, H] -> logits [batch, w, V]; rows whose logits are not finite are marked."""
        logits = self.target.ends.project(final_state)
        state.invalid_target.logical_or_(~logits.amax(-1).isfinite().all(-1) & ~state.finished)
        return logits

    def _choose(self, logits: Tensor, state: DecodingState, sampling: SamplingOptions) -> Tensor:
        """The target's own token at each position: logits [batch, w, V] -> [batch, w]."""
        if sampling.greedy:
            return logits.argmax(-1)
        return draw_token(distribution(logits, sampling), self._noise(state, logits.shape[1])[0])

    def _verify(self, decoding: Decoding, final_state: Tensor, proposals: Proposals) -> Verdict:
        state, sampling = decoding.state, decoding.request.sampling
        logits = self._logits(state, final_state)  # [batch, w, V]
        if sampling.greedy or proposals.q is None:
            return verify_chosen(self._choose(logits, state, sampling), proposals.token_ids, proposals.count)
        uniform, accept_uniform = self._noise(state, self.width)
        p = distribution(logits, sampling)
        return verify_sampled(p, proposals.token_ids, proposals.q, proposals.count, uniform, accept_uniform)

    def _noise(self, state: DecodingState, width: int) -> tuple[Tensor, Tensor]:
        """The numbers of the next `width` output positions, [batch, width] fp64 each (`Stream.TOKEN`)."""
        positions = state.length[:, None] + torch.arange(width, device=state.length.device)
        return uniform_pair(state.seeds[:, None], positions, Stream.TOKEN)

    # --- construction -------------------------------------------------------------------------------------------------

    def _check(self, draft: Draft) -> None:
        check_against_target(draft.config, self.target)
        if self.options.verify_width is not None:
            raise DraftsmithError(
                f"verify_width is {self.options.verify_width}, but with a draft the width follows from the proposals; "
                "leave it out, or set num_proposals"
            )
        if draft.device != self.target.device:
            raise DraftsmithError(
                f"the draft is on {draft.device} and the target on {self.target.device}; load both on one device"
            )

    def _refuse_draft_options(self) -> None:
        for name, value in (("num_proposals", self.options.num_proposals), ("proposer", self.options.proposer or None)):
            if value is not None:
                raise DraftsmithError(f"{name} is {value!r}, but there is no draft to propose; leave it out")


@dataclass(frozen=True)
class RowSampler:
    """The `TokenSampler` of one block: draws from each row's own noise at its anchor's position [batch]."""

    sampling: SamplingOptions
    seeds: Tensor
    anchors: Tensor

    def __call__(self, logits: Tensor, draw: int) -> tuple[Tensor, Tensor | None]:
        """logits [batch, V] -> (ids [batch], q [batch, V], or None when greedy)."""
        if self.sampling.greedy:
            return logits.argmax(-1), None
        q = distribution(logits, self.sampling)
        return draw_token(q, uniform_pair(self.seeds, self.anchors, Stream.PROPOSAL, draw)[0]), q


def _present(tensor: Tensor | None) -> Tensor:
    """A tensor that was asked for, and therefore is there."""
    assert tensor is not None
    return tensor
