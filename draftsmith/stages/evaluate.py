"""An evaluation during training by the real engine: what a draft would do if it were served as it is."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from draftsmith.blocks.accept import counted_verifies
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target


def by_generating(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
    engine: EngineOptions | None = None,
    busy: AbstractContextManager[Any] | None = None,
) -> Callable[[Draft], dict[str, float]]:
    """A function for `training.hooks.Hooks`: greedy answers to `prompts` (token ids), decoded speculatively.

    It returns `accept_length`, the tokens committed per verify (`blocks.accept.counted_verifies`), and `tokens`, how
    many were made; just `tokens` where no verify counts.
    engine: its options. busy: held while the target runs, where another thread uses it too.
    """
    turn: AbstractContextManager[Any] = busy if busy is not None else nullcontext()

    def evaluate(draft: Draft) -> dict[str, float]:
        served = draft.to(target.device, target.dtype)
        with turn:
            answers = generate(
                target,
                served,
                [list(prompt) for prompt in prompts],
                max_new_tokens=max_new_tokens,
                stop_token_ids=tuple(stop_token_ids),
                options=engine,
            )
        lengths = [n for one in answers for n in counted_verifies(one.accept_lengths, one.finish_reason)]
        numbers = {"tokens": float(sum(len(answer.token_ids) for answer in answers))}
        return {"accept_length": sum(lengths) / len(lengths), **numbers} if lengths else numbers

    return evaluate
