"""The state of a batch of rows: a few tensors on the device, changed in place, with no look from the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decoding.request import Request
from draftsmith.decoding.verify import Verdict


@dataclass(frozen=True)
class DecodingState:
    """Rows in the making. Every length is a counter; what lies in `tokens` past `length` means nothing.

    tokens [batch, max(limit) + width] int64, prompt and committed tokens; length [batch] int64, how many of them
    count: the last one, at length - 1, is the anchor, and has not been through the target. prompt_length [batch]
    int64; limit [batch] int64, the length at which the row ends; finished [batch] bool; stopped [batch] bool,
    finished by a stop token. accept_lengths [batch, max_new_tokens + 1] int64, tokens committed by each verify;
    verifies [batch] int64, how many of them count. seeds [batch] int64; stop_ids [n] int64. invalid_target and
    invalid_draft [batch] bool: the row met logits of the target, or states of the draft, that are not finite.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    limit: Tensor
    finished: Tensor
    stopped: Tensor
    accept_lengths: Tensor
    verifies: Tensor
    seeds: Tensor
    stop_ids: Tensor
    invalid_target: Tensor
    invalid_draft: Tensor

    @property
    def anchor(self) -> Tensor:
        """Position of the last committed token: [batch] int64."""
        return self.length - 1

    @property
    def anchor_ids(self) -> Tensor:
        """The last committed token: [batch] int64."""
        return self.tokens.gather(1, self.anchor[:, None])[:, 0]

    def verify_positions(self, width: int) -> Tensor:
        """Positions of the anchor and the width - 1 tokens after it: [batch, width] int64, none beyond the row's last.

        A token at the last position that the row may fill decides nothing any more, so all that would lie beyond it
        is put there: neither the caches nor the target's window need room past the limit. Several tokens may then
        fall on that one position; whichever of them its cache entries come from, no query that counts sees them.
        """
        steps = torch.arange(width, device=self.length.device)
        return torch.minimum(self.anchor[:, None] + steps, self.limit[:, None] - 1)

    def commit(self, verdict: Verdict) -> Tensor:
        """Appends what a verdict grants: at most up to the first stop token (kept) and to the limit.

        Returns the number of tokens committed, [batch] int64: 0 for finished rows, at least 1 for the others.
        """
        width = verdict.token_ids.shape[1]
        index = torch.arange(width, device=self.length.device)
        room = torch.minimum(verdict.count, self.limit - self.length)
        is_stop = (verdict.token_ids.unsqueeze(-1) == self.stop_ids).any(-1) & (index < room[:, None])  # [batch, width]
        before_stop = (is_stop.long().cumsum(-1) == 0).long().sum(-1)  # width when there is none
        stops = is_stop.any(-1) & ~self.finished
        committed = torch.minimum(room, before_stop + 1).masked_fill(self.finished, 0)

        # Whole blocks are written; the length says what counts.
        self.tokens.scatter_(1, self.length[:, None] + index, verdict.token_ids)
        self.length.add_(committed)
        self.stopped.logical_or_(stops)
        self.finished.logical_or_(self.stopped | (self.length >= self.limit))
        return committed

    def record(self, committed: Tensor) -> None:
        """Notes what one verify committed (`commit`'s result), for the rows that it was made for."""
        self.accept_lengths.scatter_(1, self.verifies[:, None], committed[:, None])
        self.verifies.add_((committed > 0).long())


def new_state(request: Request, window: int, width: int, device: torch.device) -> DecodingState:
    """The state before prefill: prompts in place, nothing committed.

    window: the target's, in tokens; width: the widest verify. `request` must have been checked against the window.
    """
    lengths = [len(prompt) for prompt in request.prompts]
    limits = [min(length + request.max_new_tokens, window) for length in lengths]
    batch = len(lengths)
    tokens = torch.zeros(batch, max(limits) + width, dtype=torch.int64)
    for row, prompt in enumerate(request.prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)

    def counters(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def flags() -> Tensor:
        return torch.zeros(batch, dtype=torch.bool, device=device)

    return DecodingState(
        tokens=tokens.to(device),
        length=counters(lengths),
        prompt_length=counters(lengths),
        limit=counters(limits),
        finished=flags(),
        stopped=flags(),
        # A row makes at most one verify a token; a finished row's zeros go into the last column.
        accept_lengths=torch.zeros(batch, request.max_new_tokens + 1, dtype=torch.int64, device=device),
        verifies=counters([0] * batch),
        seeds=counters(list(request.seeds)),
        stop_ids=counters(list(request.stop_token_ids)),
        invalid_target=flags(),
        invalid_draft=flags(),
    )
