"""Prompts as people write them, as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.data.chat import render_prompt
from draftsmith.data.options import DataOptions
from draftsmith.errors import DraftsmithError
from draftsmith.targets.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or the messages of a chat ({"role": ..., "content": ...})."""


def prompt_ids(prompts: Sequence[Prompt], target: Target) -> list[list[int]]:
    """Token ids of each prompt.

    A text is encoded as the tokenizer does it, its begin-of-text token included, and continued as it is; messages are
    rendered by the tokenizer's chat template, so that the assistant's next answer follows. Token ids stay what they
    are, unchecked. DraftsmithError: texts or messages for a target without a tokenizer, messages that its template
    refuses, and one prompt in place of a list of them.
    """
    if isinstance(prompts, str):
        raise DraftsmithError(f"prompts is the text {prompts!r:.60}; give a list of prompts, such as [text]")
    return [_ids(prompt, index, target) for index, prompt in enumerate(prompts)]


def _ids(prompt: Any, index: int, target: Target) -> list[int]:
    if isinstance(prompt, Mapping):
        raise DraftsmithError(f"prompt {index} is a message; a chat is a list of messages, and prompts a list of chats")
    if not isinstance(prompt, str | Sequence):
        raise DraftsmithError(
            f"prompt {index} is a {type(prompt).__name__}; give a text, a list of token ids or a list of messages"
        )
    if isinstance(prompt, str):
        return [int(token) for token in _tokenizer(target, f"prompt {index} is a text").encode(prompt)]
    if len(prompt) > 0 and all(isinstance(each, Mapping) for each in prompt):
        return render_prompt(prompt, _tokenizer(target, f"prompt {index} is a chat"), DataOptions())
    return list(prompt)


def _tokenizer(target: Target, needing: str) -> Any:
    if target.tokenizer is None:
        raise DraftsmithError(f"{needing}, and the target {target.source} has no tokenizer; give token ids")
    return target.tokenizer
