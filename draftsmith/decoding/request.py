"""What is asked of the engine, checked before any work, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from draftsmith.decoding.rng import row_seeds
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class Generation:
    """One row's result.

    token_ids: the new tokens only; a stop token is kept, as the last one. accept_lengths: tokens committed by each
    verify, after the first token, which prefill gives: they add up to len(token_ids) - 1. finish_reason: "stop" (a
    stop token) or "length" (max_new_tokens, or the end of the target's window). text: the new tokens as text, without
    special tokens; None where no tokenizer is at hand.
    """

    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: Literal["stop", "length"]
    text: str | None = None


@dataclass(frozen=True)
class Request:
    """A ragged batch of prompts and what to make of them.

    prompts: token ids, at least one each; max_new_tokens >= 1; stop_token_ids: a row ends with the first of them that
    it generates (those in prompts do not count); seeds: one a row, in [0, 2^63), for sampling.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    sampling: SamplingOptions
    stop_token_ids: tuple[int, ...]
    seeds: tuple[int, ...]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingOptions,
        stop_token_ids: Sequence[int] = (),
        seed: int | Sequence[int] | None = None,
    ) -> "Request":
        """A request from loose values; raises `DraftsmithError` naming the value that is wrong.

        seed: one number, from which every row gets its own by its index; or one number a row; or None, for a fresh one
        from torch's default generator.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise DraftsmithError(f"max_new_tokens is {max_new_tokens!r}; it needs an integer >= 1")
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                raise DraftsmithError(f"prompt {index} is the text {prompt!r:.60}; a request holds lists of token ids")
        rows = tuple(tuple(prompt) for prompt in prompts)
        for index, row in enumerate(rows):
            if not row:
                raise DraftsmithError(f"prompt {index} is empty; a prompt needs at least one token id")
        return cls(rows, max_new_tokens, sampling, tuple(stop_token_ids), _seeds(seed, len(rows)))

    def check(self, vocab_size: int, window: int, draft_positions: int | None, max_length: int | None) -> None:
        """Refuses what the models cannot take: ids outside [0, vocab_size), prompts that leave no room in the target's
        `window` of tokens, exceed the draft's positions, or may become longer than a slot's max_length. Raises
        `DraftsmithError` naming the numbers."""
        for index, prompt in enumerate(self.prompts):
            _check_ids(prompt, vocab_size, f"prompt {index}")
            if len(prompt) >= window:
                raise DraftsmithError(
                    f"prompt {index} has {len(prompt)} tokens, and the target's window is {window} tokens, of which at "
                    "least one must be left for the answer; shorten the prompt"
                )
            if draft_positions is not None and len(prompt) > draft_positions:
                raise DraftsmithError(
                    f"prompt {index} has {len(prompt)} tokens, and the draft's max_position_embeddings is "
                    f"{draft_positions}; shorten the prompt, or decode it without a draft"
                )
            longest = min(len(prompt) + self.max_new_tokens, window)
            if max_length is not None and longest > max_length:
                raise DraftsmithError(
                    f"prompt {index} has {len(prompt)} tokens and may become {longest} long, but a slot has room for "
                    f"{max_length} (max_length); shorten it, lower max_new_tokens or raise max_length"
                )
        _check_ids(self.stop_token_ids, vocab_size, "stop_token_ids")


def _check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise DraftsmithError(
                f"{what} holds token id {token!r}; the target's ids are integers in [0, {vocab_size})"
            )


def _seeds(seed: int | Sequence[int] | None, rows: int) -> tuple[int, ...]:
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    if isinstance(seed, int):
        return tuple(row_seeds(seed, rows))
    if len(seed) != rows:
        raise DraftsmithError(
            f"seed holds {len(seed)} numbers for {rows} prompts; give one a prompt, or a single number"
        )
    for value in seed:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise DraftsmithError(f"seed holds {value!r}; seeds are integers in [0, 2^63)")
    return tuple(seed)
