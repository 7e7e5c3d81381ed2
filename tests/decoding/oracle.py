"""A proposer for tests: through the engine's own interface, with tokens that are right just as far as wanted."""

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.algorithms.algorithm import Proposals, TokenSampler
from draftsmith.decoding.engine import Decoding, Engine
from draftsmith.decoding.request import Generation, Request


class Oracle:
    """Knows every row's answer, and proposes so many right tokens as `right(row, done)` says (then wrong ones).

    `done` counts the tokens that the row has. `count`, if given, says in the same way how many proposals are worth
    verifying; `shift` misplaces all proposals by so many slots, as a wrong slot convention would.
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
        self.decoding: Decoding | None = None

    def propose(self, hidden: Tensor, anchor_ids: Tensor, sampler: TokenSampler) -> Proposals:
        assert self.decoding is not None
        state = self.decoding.state
        done = (state.length - state.prompt_length).tolist()
        tokens = [self._row(row, tokens_done) for row, tokens_done in enumerate(done)]
        count = None if self.count is None else torch.tensor([self.count(row, d) for row, d in enumerate(done)])
        return Proposals(torch.tensor(tokens), count=count)

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
    engine.proposer, engine.width = oracle, 1 + oracle.num_proposals
    decoding = engine.start(request)
    oracle.decoding = decoding
    while not engine.finished(decoding):
        engine.step(decoding)
    return engine.results(decoding)


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
