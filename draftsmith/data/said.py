"""What a model said, as token ids and as a chat message: ids are the truth, people and templates read the message."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import REASONING, Messages, answer_text, encode_text, render_text, special_token_ids
from draftsmith.data.options import DataOptions
from draftsmith.data.prompt import answer_message
from draftsmith.errors import DraftsmithError

_PROBES = {"content": "Draftsmith answers here", REASONING: "Draftsmith reasons here"}


@dataclass(frozen=True)
class Said:
    """message: role, content and perhaps reasoning_content; renders: whether the chat template gives back, from the
    message alone, the ids that were generated."""

    message: dict[str, str]
    renders: bool


def message_of(
    token_ids: Sequence[int],
    finished: bool,
    question: Messages,
    prompt_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
) -> Said:
    """The message for the tokens that were generated after `question`, whose rendering is `prompt_ids`.

    finished: they end with a stop token, and not at a length limit. The message is the first of these whose rendering
    begins with the very tokens: the text as it is; its reasoning apart from its content, as the template itself puts
    the two together (`<think>` blocks, channels); its content after what the template puts before it; the text with its
    special tokens. An answer that was cut off has no rendering, and takes the first form that its text is of.
    """
    ended = finished and token_ids[-1] in special_token_ids(tokenizer)
    words = list(token_ids[:-1] if ended else token_ids)
    plain = _whole(answer_text(words, tokenizer))
    marked = _whole(answer_text(words, tokenizer, special_tokens=True))
    forms = _forms(plain, marked, question, tokenizer, options)
    wanted = [*prompt_ids, *words]
    usable: list[dict[str, str]] = []
    for message in forms:
        try:
            rendered = encode_text(
                render_text([*question, message], tokenizer, options, generation_prompt=False), tokenizer
            )
        except DraftsmithError:
            continue  # a form that the template refuses could not be asked about either
        if not finished or rendered[: len(wanted)] == wanted:
            return Said(message, finished)
        usable.append(message)
    return Said(usable[0] if usable else answer_message(plain), False)


def check_said(
    identity: str, message: dict[str, str], token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise `DraftsmithError` where these ids are not this message's: ids of another tokenizer, or a text that was
    edited afterwards."""
    known = len(tokenizer)
    decoded = ("", "")
    if all(token < known for token in token_ids):
        decoded = (answer_text(token_ids, tokenizer), answer_text(token_ids, tokenizer, special_tokens=True))
    for name in _PROBES:
        text = message.get(name, "").strip()
        if not any(text in whole for whole in decoded):
            raise DraftsmithError(
                f"conversation {identity!r}: the {name} {text!r:.60} of an answer is not the text of its "
                f"answer_token_ids ({decoded[1]!r:.60}): they are of another tokenizer, or the text was edited; remove "
                "answer_token_ids from the line to train on the text"
            )


def _forms(
    plain: str, marked: str, question: Messages, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> Iterator[dict[str, str]]:
    """The messages that the text may be of, the likeliest first; `marked` is it with its special tokens."""
    if plain == marked:
        yield answer_message(plain)
    for fields in ((REASONING, "content"), ("content",)):
        pieces = _frame(fields, question, tokenizer, options)
        parts = None if pieces is None else _parts(marked, pieces)
        if parts is not None:
            yield answer_message("") | {name: text for name, text in zip(fields, parts, strict=True) if text}
    if plain != marked:
        yield answer_message(marked)
        yield answer_message(plain)


def _frame(
    fields: Sequence[str], question: Messages, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> list[str] | None:
    """What the template puts before each of these fields of an answer; None where it does not render them in this order
    after its generation prompt."""
    message = answer_message("") | {name: _PROBES[name] for name in fields}
    prompt = render_text(question, tokenizer, options, generation_prompt=True)
    try:
        whole = render_text([*question, message], tokenizer, options, generation_prompt=False)
    except DraftsmithError:
        return None
    pieces = re.split("|".join(map(re.escape, _PROBES.values())), whole.removeprefix(prompt))
    order = [whole.find(_PROBES[name]) for name in fields]
    if not whole.startswith(prompt) or len(pieces) != len(fields) + 1 or order != sorted(order):
        return None
    return pieces[:-1]


def _parts(text: str, pieces: Sequence[str]) -> list[str] | None:
    """The texts that follow each of the pieces in a text made of them in turn. It may end early, within a part or a
    piece: the rest is empty then. None for another text."""
    first, *others = pieces
    if not first or not text.startswith(first):
        return None
    parts, rest = [], text[len(first) :]
    for piece in others:
        part, found, rest = rest.partition(piece)
        if not found:
            started = next(n for n in range(len(piece), -1, -1) if part.endswith(piece[:n]))
            part = part[: len(part) - started]
        parts.append(part)
    return [*parts, rest]


def _whole(text: str) -> str:
    """Without a character at the end of which only the first tokens are there: these decode to U+FFFD."""
    return text.rstrip("\ufffd")
