"""A filler for tests: through the engine's own interface, with tokens that are right just as far as wanted."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.algorithms.drafter import Proposals, Sampler, StatesWanted
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.request import Generation, Request


class Nothing:
    """The state of a drafter that keeps none."""

    def rows(self, begin: int, end: int) -> "Nothing":
        return self

    def erase(self, slots: Sequence[int]) -> None:
        pass


class Oracle:
    """Knows every prompt's answer, and proposes so many right tokens as `right(row, done)` says (then wrong ones).

    `done` counts the tokens that the row has. `count`, if given, says in the same way how many proposals are worth
    verifying; `shift` misplaces all proposals by so many slots, as a wrong slot convention would. It looks at numbers
    of the device, so no graph can hold it.
    """

    def __init__(
        self,
        answers: list[list[int]],
        num_proposals: int,
        vocab_size: int,
        right: Callable[[int, int], int],
        *,
        count: Callable[[int, int], int] | None = None,
        shift: int = 0,
    ) -> None:
        self.answers, self.num_proposals, self.vocab_size = answers, num_proposals, vocab_size
        self.right, self.count, self.shift = right, count, shift
        self.engine: Engine | None = None

    wants = StatesWanted()

    @property
    def width(self) -> int:
        return self.num_proposals + 1

    reach = width

    def new_state(self, slots: int, length: int) -> Nothing:
        return Nothing()

    def read(self, *_: object) -> None:
        pass

    update = read

    def propose(self, state: Nothing, anchors: Tensor, anchor_ids: Tensor, extent: int, sampler: Sampler) -> Proposals:
        assert self.engine is not None
        pool = self.engine.runner.pool
        assert pool is not None
        lengths = pool.state.length.tolist()
        rows = [
            (0, 0) if answer is None else (answer.index, max(lengths[slot] - len(answer.prompt), 0))
            for slot, answer in enumerate(self.engine.scheduler.occupants)
        ]
        tokens = [self._row(row, done) for row, done in rows]
        counts = None if self.count is None else [self.count(row, done) for row, done in rows]
        device = anchors.device
        return Proposals(
            torch.tensor(tokens, device=device), count=None if counts is None else torch.tensor(counts, device=device)
        )

    def _row(self, row: int, done: int) -> list[int]:
        answer, right = self.answers[row], self.right(row, done)
        tokens = []
        for slot in range(self.num_proposals):
            known = done + slot + self.shift
            token = answer[known] if known < len(answer) else 0
            tokens.append(token if slot < right else (token + 1) % self.vocab_size)
        return tokens


def decode_with(engine: Engine, request: Request, oracle: Oracle) -> list[Generation]:
    """`engine.decode` with the oracle in place of the draft's own method."""
    engine.drafter = oracle
    oracle.engine = engine
    return engine.decode(request)


def expected_accept_lengths(
    total: int, num_proposals: int, right: Callable[[int], int], count: Callable[[int], int] | None = None
) -> list[int]:
    """What an oracle's verifies commit of a row that ends after `total` tokens."""
    lengths, done = [], 1
    while done < total:
        accepted = min(right(done), num_proposals if count is None else count(done))
        lengths.append(min(accepted + 1, total - done))
        done += lengths[-1]
    return lengths
