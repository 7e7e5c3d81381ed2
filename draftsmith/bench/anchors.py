"""What a draft would propose at every position of a text that the target has written.

A verify may begin anywhere, and what a greedy draft proposes from an anchor depends only on the text before it. So the
acceptance at every anchor says what any number of proposals would have done to that text, in whatever places its
verifies begin: `replay` walks it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.algorithms.drafter import AnyDrafter, DraftState
from draftsmith.algorithms.registry import algorithm_for
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target, TargetStates

ROWS = 32
"""Anchors that go through the draft together."""

CHUNK = 64
"""Tokens of a row that a drafter takes in at a time."""


@dataclass(frozen=True)
class Anchored:
    """Acceptance at every anchor of one text, in order: anchor i is the i-th new token, and its block proposes what
    follows it.

    accepted: proposals before the first that the text does not have. The last anchors' blocks go past the end of the
    text, where nothing is accepted.
    """

    accepted: tuple[int, ...]


class GreedySampler:
    """The `Sampler` of `batch` greedy rows, which remembers the chances that the logits gave."""

    greedy = True
    filtered = None

    def __init__(self, batch: int, device: torch.device) -> None:
        self.chances: list[Tensor] = []
        self.temperature = torch.zeros(batch, device=device)
        self.seeds = self.anchors = torch.zeros(batch, dtype=torch.int64, device=device)  # nothing is drawn

    def __call__(self, logits: Tensor, draw: int) -> tuple[Tensor, Tensor | None]:
        ids = logits.argmax(-1)
        self.chances.append(logits.float().softmax(-1).gather(-1, ids[:, None])[:, 0])
        return ids, None


@dataclass(frozen=True)
class Proposed:
    """What a draft proposes at some anchors: token_ids [n, P] int64, and chances [n, P] fp32 (its own, of each)."""

    token_ids: Tensor
    chances: Tensor


@torch.no_grad()
def proposals_at(target: Target, draft: Draft, token_ids: Sequence[int], anchors: Sequence[int]) -> Proposed:
    """The draft's greedy proposals at `anchors` (positions, rising) of a text, each as if a verify began there."""
    drafter = algorithm_for(draft.config).stepwise_drafter(draft, target.ends)
    text = _Text.read_by(target, drafter, token_ids)
    rows, extent = min(ROWS, len(anchors)), len(token_ids) + max(drafter.reach, CHUNK)
    state = drafter.new_state(rows, extent)
    taken = [0] * rows
    parts: list[Proposed] = []
    for begin in range(0, len(anchors), rows):
        few = len(anchors[begin : begin + rows])
        # Each row goes on from its anchor before; rows without a further one stay where they are.
        at = [*anchors[begin : begin + rows], *taken[few:]]
        text.give(drafter, state, taken, at)
        taken = at
        positions, sampler = text.numbers(at), GreedySampler(rows, target.device)
        proposed = drafter.propose(state, positions, text.ids[positions], extent, sampler)
        parts.append(Proposed(proposed.token_ids[:few], torch.stack(sampler.chances, dim=1)[:few]))
    return Proposed(torch.cat([part.token_ids for part in parts]), torch.cat([part.chances for part in parts]))


def anchored(target: Target, draft: Draft, prompt: Sequence[int], answer: Sequence[int]) -> Anchored:
    """Acceptance at every token of the answer; both are token ids, and the answer is what the target said, greedily."""
    text = [*prompt, *answer]
    anchors = range(len(prompt), len(text))
    proposed = proposals_at(target, draft, text, anchors)
    width = proposed.token_ids.shape[1]
    accepted = []
    for anchor, line in zip(anchors, proposed.token_ids.tolist(), strict=True):
        following = text[anchor + 1 : anchor + 1 + width]
        right = 0
        while right < len(following) and line[right] == following[right]:
            right += 1
        accepted.append(right)
    return Anchored(tuple(accepted))


def replay(text: Anchored, num_proposals: int) -> list[int]:
    """Tokens committed by each verify of a text, with at most so many proposals a block.

    The text's first token comes with the prompt; the verifies' tokens add up to the others, the last verify cut at the
    end of the text.
    """
    last = len(text.accepted) - 1
    place, lengths = 0, []
    while place < last:
        committed = min(min(text.accepted[place], num_proposals) + 1, last - place)
        lengths.append(committed)
        place += committed
    return lengths


@dataclass(frozen=True)
class _Text:
    """A text's ids [S] int64 and the target's states of it [1, S, ...]."""

    ids: Tensor
    states: TargetStates

    @classmethod
    def read_by(cls, target: Target, drafter: AnyDrafter, token_ids: Sequence[int]) -> "_Text":
        """With the states that the drafter wants."""
        ids, wants = torch.tensor(list(token_ids), device=target.device), drafter.wants
        if not wants.tap_ids and not wants.final_state:
            return cls(ids, TargetStates(None, None))
        positions = torch.arange(len(ids), device=target.device)[None]
        return cls(ids, target.forward(ids[None], positions, tap_ids=wants.tap_ids, final_state=wants.final_state))

    def numbers(self, values: Sequence[int]) -> Tensor:
        """Host numbers beside the text."""
        return torch.tensor(values, device=self.ids.device)

    def give(self, drafter: AnyDrafter, state: DraftState, begin: Sequence[int], end: Sequence[int]) -> None:
        """Has the drafter take in positions begin .. end - 1 of each row."""
        while begin != end:
            upto = [min(first + CHUNK, last) for first, last in zip(begin, end, strict=True)]
            counts = [last - first for first, last in zip(begin, upto, strict=True)]
            start = self.numbers(begin)
            places = start[:, None] + torch.arange(max(counts), device=start.device)
            places = places.clamp(max=len(self.ids) - 1)  # for padding, any token will do
            states = TargetStates(*(None if of is None else of[0, places] for of in _both(self.states)))
            drafter.read(state, self.ids[places], states, start, self.numbers(counts))
            begin = upto


def _both(states: TargetStates) -> tuple[Tensor | None, Tensor | None]:
    return states.taps, states.final_state
