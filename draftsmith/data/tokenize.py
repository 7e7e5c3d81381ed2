"""Conversations as token ids with a loss mask, which always comes from the chat template itself."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import (
    chat_template,
    default_system_prompt,
    render_ids,
    render_text,
    render_with_assistant_mask,
    special_token_ids,
    template_name,
    with_system_prompt,
)
from draftsmith.data.options import DataOptions
from draftsmith.data.sample import Conversation, Sample
from draftsmith.errors import DraftsmithError

_log = logging.getLogger(__name__)

# How transformers itself tells that a template marks the assistant's tokens.
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
MISMATCH_FIX = "data.chat_template: FILE), or leave such conversations out (data.template_mismatch: skip"


class TemplateMismatch(DraftsmithError):
    """A conversation in whose rendering the assistant's tokens cannot be told apart."""


@dataclass
class TokenizeReport:
    """What became of the conversations.

    conversations read; samples kept, with their tokens and supervised_tokens; cut: samples shortened to `max_length`;
    skipped: samples left out for their length; unsupervised: samples left out for want of a supervised token (after
    cutting); mismatched: conversations left out because the template hides their answers; default_system_prompt: what
    the template adds to conversations without a system message.
    """

    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    cut: int = 0
    skipped: int = 0
    unsupervised: int = 0
    mismatched: int = 0
    default_system_prompt: str | None = None

    def line(self) -> str:
        """The counts for people; what was left out only where something was."""
        left_out = {
            "cut": self.cut,
            "skipped for their length": self.skipped,
            "without anything to learn": self.unsupervised,
            "hidden by the template": self.mismatched,
        }
        notes = "".join(f", {count:,} {what}" for what, count in left_out.items() if count)
        return f"{self.conversations:,} read, {self.samples:,} samples, {self.tokens:,} tokens{notes}"


def tokenize_all(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[list[Sample], TokenizeReport]:
    """Tokenises conversations in order and applies `turns`, `max_length` and `overlong`, counting everything left out.

    DraftsmithError: an over-long sample under `overlong: error`, a template that hides the answers (unless
    `template_mismatch: skip`), or nothing left to learn.
    """
    report = TokenizeReport(default_system_prompt=default_system_prompt(tokenizer, options))
    if report.default_system_prompt is not None:
        _log.info(
            "%s adds a system prompt to conversations without one: %r (data.system_prompt sets another)",
            template_name(tokenizer, options),
            report.default_system_prompt,
        )
    samples: list[Sample] = []
    for conversation in conversations:
        report.conversations += 1
        parts = answers_apart(conversation) if options.turns == "apart" else [conversation]
        try:
            tokenized = [tokenize(part, tokenizer, options) for part in parts]
        except TemplateMismatch:
            if options.template_mismatch == "error":
                raise
            report.mismatched += 1
            continue
        for sample in tokenized:
            fitted = _fit(sample, options, report)
            if fitted is None:
                continue
            supervised = int(fitted.loss_mask.sum())
            if supervised == 0:
                report.unsupervised += 1
                continue
            samples.append(fitted)
            report.samples += 1
            report.tokens += len(fitted.input_ids)
            report.supervised_tokens += supervised
    if not samples:
        raise DraftsmithError(
            f"no sample is left of {report.conversations} conversations: {report.skipped} too long, "
            f"{report.unsupervised} without a supervised token within data.max_length {options.max_length}, "
            f"{report.mismatched} that the chat template hides; raise data.max_length or give other data"
        )
    return samples, report


def tokenize(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> Sample:
    """One conversation as the target is served it, uncut: `max_length` is `tokenize_all`'s to apply.

    Supervised are the tokens of every answer (with `turns: apart`, of the last one) up to and including its end-of-turn
    token, not the header before it. The mask comes from {% generation %} where the template has it; otherwise an answer
    lies between the rendering up to it with a generation prompt and the rendering up to its end, each of which must be
    a token prefix of the next. An answer that was cut off ends the sample before the template's end-of-turn token.

    TemplateMismatch: the spans cannot be told apart. DraftsmithError: no template, or it refuses the messages.
    """
    messages = with_system_prompt(conversation.messages, options)
    if GENERATION_TAG.search(chat_template(tokenizer, options)):
        ids, spans = _marked_spans(conversation.id, messages, tokenizer, options)
    else:
        ids, spans = _prefix_spans(conversation.id, messages, tokenizer, options)
    if options.turns == "apart":
        spans = spans[-1:]
    if not conversation.finished and spans and messages[-1]["role"] == "assistant":
        start, end = spans[-1]
        if ids[end - 1] in special_token_ids(tokenizer):
            spans[-1] = (start, end - 1)
        ids = ids[: spans[-1][1]]
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    return Sample(conversation.id, torch.tensor(ids, dtype=torch.int64), mask)


def answers_apart(conversation: Conversation) -> list[Conversation]:
    """One conversation per answer, each with all the messages before it; ids get the answer's number appended."""
    ends = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    last = len(conversation.messages) - 1
    return [
        replace(
            conversation,
            id=f"{conversation.id}/{number}",
            messages=conversation.messages[: end + 1],
            finished=conversation.finished or end != last,
        )
        for number, end in enumerate(ends)
    ]


def _prefix_spans(
    identity: str, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and the answers' [start, end) by rendering growing prefixes of the conversation."""
    full = render_ids(messages, tokenizer, options, generation_prompt=False)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if options.turns == "apart":
        answers = answers[-1:]
    spans = []
    for index in answers:
        prompt = render_ids(messages[:index], tokenizer, options, generation_prompt=True)
        through = render_ids(messages[: index + 1], tokenizer, options, generation_prompt=False)
        start = len(prompt)
        end = _end_of_turn(through, start, tokenizer)
        if through[:start] != prompt:
            cause = _header_cause(messages, index, tokenizer, options)
        elif full[:end] != through[:end]:
            cause = (
                "the rest of the conversation changes how it is rendered (templates that drop earlier reasoning do); "
                "data.turns: apart trains each answer on its own, as it is served"
            )
        elif end == start:
            cause = "nothing is rendered for it"
        else:
            spans.append((start, end))
            continue
        raise TemplateMismatch(
            f"conversation {identity!r}, message {index}: {template_name(tokenizer, options)} does not show which "
            f"tokens the assistant wrote: {cause}. Otherwise give a template with {{% generation %}} "
            f"({MISMATCH_FIX})"
        )
    return full, spans


def _header_cause(
    messages: list[dict[str, str]], index: int, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> str:
    prompt = render_text(messages[:index], tokenizer, options, generation_prompt=True)
    through = render_text(messages[: index + 1], tokenizer, options, generation_prompt=False)
    if through.startswith(prompt):
        return (
            "the answer's first characters make one token with the end of the header before it; strip the white space "
            "at the answer's start"
        )
    return "the answer is not rendered after the template's generation prompt"


def _end_of_turn(ids: Sequence[int], start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Where an answer that begins at `start` ends: after its last special token, if only white space follows that."""
    special = special_token_ids(tokenizer)
    for index in range(len(ids) - 1, start - 1, -1):
        if ids[index] in special:
            return index + 1 if not str(tokenizer.decode(list(ids[index + 1 :]))).strip() else len(ids)
    return len(ids)


def _marked_spans(
    identity: str, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and the answers' [start, end) as {% generation %} marks them.

    A template whose mark ends just before the eos token leaves out a token that the target does write: it is added.
    """
    ids, mask = render_with_assistant_mask(messages, tokenizer, options)
    edges = [index for index in range(1, len(ids)) if mask[index] != mask[index - 1]]
    if ids and mask[0]:
        edges.insert(0, 0)
    if ids and mask[-1]:
        edges.append(len(ids))
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    answers = sum(message["role"] == "assistant" for message in messages)
    if len(spans) != answers:
        raise TemplateMismatch(
            f"conversation {identity!r}: {template_name(tokenizer, options)} marks {len(spans)} spans with "
            f"{{% generation %}} for {answers} answers; mend the template ({MISMATCH_FIX})"
        )
    eos = tokenizer.eos_token_id
    return ids, [
        (start, end + 1 if end < len(ids) and ids[end] == eos and eos not in ids[start:end] else end)
        for start, end in spans
    ]


def _fit(sample: Sample, options: DataOptions, report: TokenizeReport) -> Sample | None:
    """The sample within `max_length`, None where it is left out."""
    length = len(sample.input_ids)
    if length <= options.max_length:
        return sample
    if options.overlong == "error":
        raise DraftsmithError(
            f"conversation {sample.id!r} has {length} tokens, more than data.max_length {options.max_length}; raise "
            "it, or set data.overlong to cut or skip"
        )
    if options.overlong == "skip":
        report.skipped += 1
        return None
    report.cut += 1
    return replace(
        sample, input_ids=sample.input_ids[: options.max_length], loss_mask=sample.loss_mask[: options.max_length]
    )
