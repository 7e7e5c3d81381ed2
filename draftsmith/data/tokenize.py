"""Conversations as token ids with a loss mask, which always comes from the chat template itself."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import default_system_prompt, render_ids, template_name, with_system_prompt
from draftsmith.data.options import DataOptions
from draftsmith.data.said import check_said
from draftsmith.data.sample import Conversation, Sample
from draftsmith.data.spans import AnswerSpans, TemplateMismatch
from draftsmith.errors import DraftsmithError

_log = logging.getLogger(__name__)


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
        try:
            tokenized = samples_of(conversation, tokenizer, options)
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


def samples_of(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> list[Sample]:
    """The samples of one conversation, uncut: `max_length` is `tokenize_all`'s to apply.

    Of an answer whose generated tokens are known exactly these are supervised, after the prompt that it was given to.
    With `turns: together` one sample holds as many answers as the last one's prompt repeats token for token; an earlier
    answer that it renders otherwise (its reasoning dropped, its text in other tokens) has a sample of its own. Answers
    that are known as text are looked for in the rendering (`tokenize`).

    TemplateMismatch: these cannot be told apart. DraftsmithError: no template, it refuses the messages, or tokens that
    are not those of the text.
    """
    if conversation.answer_ids:
        return _generated(conversation, tokenizer, options)
    parts = answers_apart(conversation) if options.turns == "apart" else [conversation]
    return [tokenize(part, tokenizer, options) for part in parts]


def tokenize(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> Sample:
    """A conversation known as text, as the target is served it.

    Supervised are the tokens of every answer (with `turns: apart`, of the last one) up to and including its end-of-turn
    token, neither the header before it nor what the template itself puts before the answer's text. An answer lies
    where {% generation %} marks it; in templates without that, between the rendering up to it with a generation prompt
    and the rendering up to its end, each of which must begin the next. An answer that was cut off ends the sample, and
    follows the generation prompt as its text is.

    TemplateMismatch and DraftsmithError as `samples_of`.
    """
    found = AnswerSpans(
        conversation.id,
        with_system_prompt(conversation.messages, options),
        tokenizer,
        options,
        finished=conversation.finished,
        last_only=options.turns == "apart",
    )
    return _sample(conversation.id, found.ids, found.spans)


def _sample(identity: str, ids: Sequence[int], spans: Iterable[tuple[int, int]]) -> Sample:
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    return Sample(identity, torch.tensor(ids, dtype=torch.int64), mask)


def _generated(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> list[Sample]:
    """The samples of a conversation whose generated tokens are known."""
    messages = with_system_prompt(conversation.messages, options)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    together = options.turns == "together"
    groups: list[_Group] = []  # from the last answer to the first
    for number, index in reversed(list(enumerate(answers))):
        answer = conversation.answer_ids[number]
        check_said(conversation.id, messages[index], answer, tokenizer)
        prompt = render_ids(messages[:index], tokenizer, options, generation_prompt=True)
        ids, span = [*prompt, *answer], (len(prompt), len(prompt) + len(answer))
        if together and groups and groups[-1].ids[: len(ids)] == ids:
            groups[-1].spans.append(span)
        else:
            whole = together and not groups
            groups.append(_Group(conversation.id if whole else f"{conversation.id}/{number}", ids, [span]))
    return [_sample(group.id, group.ids, group.spans) for group in reversed(groups)]


class _Group(NamedTuple):
    """Answers that one sample holds: its id, its tokens, and [start, end) of each answer there."""

    id: str
    ids: list[int]
    spans: list[tuple[int, int]]


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
