"""What a draft would propose at every position of a text that the target has written.

A verify may begin anywhere, and what a greedy draft proposes from an anchor depends only on the text before it. So the
acceptance at every anchor says what any number of proposals would have done to that text, in whatever places its
verifies begin: `replay` walks it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.blocks.build import anchor_block_inputs
from draftsmith.decoding.cache import ContextCache, DenseBlocks
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target

ROWS = 32
"""Anchors that go through the draft together."""


@dataclass(frozen=True)
class Anchored:
    """Acceptance at every anchor of one text, in order: anchor i is the i-th new token, and its block proposes what
    follows it.

    accepted: proposals before the first that the text does not have. The last anchors' blocks go past the end of the
    text, where nothing is accepted.
    """

    accepted: tuple[int, ...]


class GreedySampler:
    """The `TokenSampler` of greedy requests, which remembers the chances that the logits gave."""

    def __init__(self) -> None:
        self.chances: list[Tensor] = []

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
    """The draft's greedy proposals at `anchors` (positions) of a text, each as if a verify began there."""
    proposer = algorithm_for(draft.config).stepwise_proposer(draft, target.ends)
    context = _context(target, draft, token_ids)
    blocks = DenseBlocks(draft)
    ids = torch.tensor(list(token_ids), device=target.device)
    extent = context.cache.length
    parts: list[Proposed] = []
    for begin in range(0, len(anchors), ROWS):
        at = torch.tensor(list(anchors[begin : begin + ROWS]), device=target.device)
        rows = replace(context, cache=context.cache.repeated(len(at)))
        hidden = blocks.block(anchor_block_inputs(ids[at], draft.config, target.ends), at, rows, extent)  # [n, B, H]
        sampler = GreedySampler()
        proposed = proposer.propose(hidden, ids[at], sampler)
        parts.append(Proposed(proposed.token_ids, torch.stack(sampler.chances, dim=1)))
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


def _context(target: Target, draft: Draft, token_ids: Sequence[int]) -> ContextCache:
    """Keys and values of the whole text in the draft's layers, as decoding gathers them; one row."""
    ids = torch.tensor([list(token_ids)], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device)[None]
    states = target.forward(ids, positions, tap_ids=draft.config.target_layer_ids, final_state=False)
    blocks = DenseBlocks(draft)
    context = blocks.new_cache(1, ids.shape[1] + draft.config.block_for("the comparison by anchors").size)
    assert states.taps is not None
    blocks.append(states.taps, torch.zeros(1, dtype=torch.int64, device=target.device), context)
    return context
