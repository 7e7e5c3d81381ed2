"""The texts of the report: which token came how, and what the draft thought at each place."""

import torch
from torch import Tensor

from draftsmith.bench.anchors import Proposed, proposals_at
from draftsmith.bench.chat import Chat
from draftsmith.bench.decoders import DraftEntry
from draftsmith.bench.options import BenchOptions
from draftsmith.bench.records import BenchAnswer, Came, ShownText, ShownToken
from draftsmith.targets.target import Target


def show(
    target: Target,
    entry: DraftEntry,
    options: BenchOptions,
    chat: Chat,
    question: str,
    prompt_ids: list[int],
    answer: BenchAnswer,
    num_proposals: int,
) -> ShownText:
    """An answer token by token, from its accept lengths. num_proposals: of each verify.

    The chances are those of the logits, before any temperature. Greedy answers get what the draft proposed at every
    verify (computed again, outside the timed runs); of sampled ones only the target's chances are known.
    """
    ids = answer.token_ids
    pieces = chat.pieces(ids)
    chances = _target_chances(target, prompt_ids, ids)
    starts = verify_starts(answer.accept_lengths)
    proposed: Proposed | None = None
    if options.temperature == 0.0 and starts:
        anchors = [len(prompt_ids) + start for start in starts]
        proposed = proposals_at(target, entry.draft, [*prompt_ids, *ids], anchors)
    most = num_proposals
    tokens = [ShownToken(text=pieces[0], came="prefill", slot=0, target=chances[0])]
    for verify, (start, length) in enumerate(zip(starts, answer.accept_lengths, strict=True)):
        for slot in range(1, length + 1):
            place = start + slot
            known = proposed is not None and slot <= most
            guess = int(proposed.token_ids[verify, slot - 1]) if proposed is not None and known else None
            sure = float(proposed.chances[verify, slot - 1]) if proposed is not None and known else None
            right = None if guess is None else guess == ids[place]
            wrong = slot == length and right is False
            tokens.append(
                ShownToken(
                    text=pieces[place],
                    came=how_it_came(slot, length, most, ends=place == len(ids) - 1, right=right),
                    slot=slot,
                    target=chances[place],
                    draft=sure if right else None,
                    instead=chat.pieces([guess])[0] if wrong and guess is not None else None,
                    instead_chance=sure if wrong else None,
                )
            )
    return ShownText(
        decoder=entry.name,
        prompt=answer.prompt,
        turn=answer.turn,
        category=answer.category,
        question=question,
        tokens=tokens,
    )


def how_it_came(slot: int, length: int, most: int, *, ends: bool, right: bool | None) -> Came:
    """How the token at `slot` (1-based) of a verify that committed `length` came, of a block of `most` proposals.

    ends: it is the answer's last, so that the verify may have granted more than is there; right: whether the draft had
    proposed it (None: not known).
    """
    if slot < length:
        return "accepted"
    if slot > most:
        return "bonus"
    if not ends:
        return "corrected"
    return "ended" if right is None else "accepted" if right else "corrected"


def verify_starts(accept_lengths: list[int]) -> list[int]:
    """For each verify, which new token (0-based) was its anchor: the first one's is the token of the prompt's pass."""
    starts, place = [], 0
    for length in accept_lengths:
        starts.append(place)
        place += length
    return starts


@torch.no_grad()
def _target_chances(target: Target, prompt_ids: list[int], answer: list[int]) -> list[float]:
    """The target's probability of each token of an answer, given all before it."""
    ids = torch.tensor([[*prompt_ids, *answer[:-1]]], device=target.device)
    positions = torch.arange(ids.shape[1], device=target.device)[None]
    final = target.forward(ids, positions).final_state
    assert final is not None
    logits: Tensor = target.ends.project(final[0, len(prompt_ids) - 1 :]).float()  # [n, V]
    chosen = torch.tensor(answer, device=target.device)[:, None]
    return [float(chance) for chance in logits.softmax(-1).gather(-1, chosen)[:, 0]]
