"""Which tokens of a rendered conversation the assistant wrote, read off the chat template.

A message holds what the assistant wrote, the template says how that is rendered, and neither shows where in the
rendering it lies. So an answer is rendered a second time with another text in its place (`_PROBE`): what comes before
and after that text is the template's own.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import (
    REASONING,
    Messages,
    added_token_at_end,
    characters_of_tokens,
    chat_template,
    encode_text,
    render_text,
    render_with_assistant_mask,
    special_token_texts,
    template_name,
)
from draftsmith.data.options import DataOptions
from draftsmith.errors import DraftsmithError

# How transformers itself tells that a template marks the assistant's tokens.
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]

_PROBE = "Draftsmith answers here"
_MISMATCH_FIX = "data.chat_template: FILE), or leave such conversations out (data.template_mismatch: skip"
_MERGED = (
    "the answer's first characters make one token with the text before it; strip the white space at the answer's start"
)
_NOT_AFTER_PROMPT = "the answer is not rendered after the template's generation prompt"
_REWRITTEN = "the template rewrites the answer's text (it drops or reformats reasoning, say)"
_LATER_TURNS = (
    "the rest of the conversation changes how it is rendered (templates that drop earlier reasoning do); "
    "data.turns: apart trains each answer on its own, as it is served"
)


class TemplateMismatch(DraftsmithError):
    """A conversation in whose rendering the assistant's tokens cannot be told apart."""


class _Unclear(Exception):
    """Why the assistant's part of a rendering is not known."""


class AnswerSpans:
    """The answers of one conversation in its token ids.

    ids: the tokens of the conversation; spans: for each answer in order its [start, end), which holds what the
    assistant wrote up to and including its end-of-turn token. An answer that was cut off ends with its last word, and
    so do the ids. What the template itself puts before an answer's text (an empty block of reasoning, say) is in the
    ids and in no span.
    """

    def __init__(
        self,
        identity: str,
        messages: Messages,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        *,
        finished: bool = True,
        last_only: bool = False,
    ) -> None:
        """messages: with their system prompt; finished False: the last answer was cut off by a length limit;
        last_only: spans of the last answer alone.

        TemplateMismatch: the spans cannot be told apart. DraftsmithError: no template, or it refuses the messages.
        """
        self._messages, self._tokenizer, self._options = list(messages), tokenizer, options
        self._special, self._eos = special_token_texts(tokenizer), tokenizer.eos_token
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        cut = not finished and bool(answers) and answers[-1] == len(messages) - 1
        index = answers[-1] if answers else 0
        try:
            self._text = self._cut_text() if cut else self._render(self._messages)
            self.ids = encode_text(self._text, tokenizer)
            marks = self._marks(identity) if GENERATION_TAG.search(chat_template(tokenizer, options)) else None
            self.spans: list[Span] = []
            for number, index in enumerate(answers):
                if last_only and index != answers[-1]:
                    continue
                if cut and index == answers[-1]:
                    span = self._tokens(self._text, self.ids, len(self._prompt(index))), len(self.ids)
                elif marks is not None:
                    span = self._marked_span(index, marks[0], marks[1][number])
                else:
                    span = self._prefix_span(index)
                self.spans.append(span)
        except _Unclear as cause:
            raise TemplateMismatch(
                f"conversation {identity!r}, message {index}: {template_name(tokenizer, options)} does not show which "
                f"tokens the assistant wrote: {cause}. Otherwise give a template with {{% generation %}} "
                f"({_MISMATCH_FIX})"
            ) from None

    # --- rendering ----------------------------------------------------------------------------------------------------

    def _render(self, messages: Messages, *, generation_prompt: bool = False) -> str:
        return render_text(messages, self._tokenizer, self._options, generation_prompt=generation_prompt)

    def _prompt(self, index: int) -> str:
        """The text after which the answer `index` was written."""
        return self._render(self._messages[:index], generation_prompt=True)

    def _probe(self, messages: Sequence[Mapping[str, str]], index: int, field: str = "content") -> str:
        """The messages with another text in a field of message `index`."""
        changed = {**messages[index], field: _PROBE}
        return self._render([*messages[:index], changed, *messages[index + 1 :]])

    def _tokens(self, text: str, ids: list[int], characters: int) -> int:
        """How many of the ids of a text its first characters make, where one of them ends with these."""
        start = encode_text(text[:characters], self._tokenizer)
        if ids[: len(start)] != start:
            raise _Unclear(_MERGED)
        return len(start)

    def _after_prompt(self, text: str, ids: list[int], prompt: int, first: int) -> int:
        """The tokens of a generation prompt of so many characters, after which the answer's begin at `first`."""
        try:
            return self._tokens(text, ids, prompt)
        except _Unclear:
            if not text[prompt:first].strip():
                raise
            raise _Unclear(
                f"the template puts {text[prompt:first]!r} between its generation prompt and the answer, in one token "
                "with the end of the prompt (for answers without reasoning, data.enable_thinking: false may give "
                "another prompt)"
            ) from None

    # --- answers that ended -------------------------------------------------------------------------------------------

    def _prefix_span(self, index: int) -> Span:
        """The span of an answer that lies between the rendering up to it, with a generation prompt, and the rendering
        up to its end."""
        prompt, through = self._prompt(index), self._render(self._messages[: index + 1])
        if not through.startswith(prompt):
            raise _Unclear(_NOT_AFTER_PROMPT)
        probe = self._probe(self._messages[: index + 1], index)
        found = self._locate(through, probe, (len(prompt), len(through)), index)
        if not self._text.startswith(through[: found.end]):
            raise _Unclear(_LATER_TURNS)
        self._after_prompt(self._text, self.ids, len(prompt), found.first)
        span = self._tokens(self._text, self.ids, found.first), self._tokens(self._text, self.ids, found.end)
        if span[0] == span[1]:
            raise _Unclear("nothing is rendered for it")
        return span

    def _marks(self, identity: str) -> tuple[list[int], list[Span]]:
        """The ids of the whole conversation, and [start, end) of every answer as {% generation %} marks it there."""
        ids, mask = render_with_assistant_mask(self._messages, self._tokenizer, self._options)
        edges = [index for index in range(len(ids)) if mask[index] != (index > 0 and mask[index - 1])]
        if mask and mask[-1]:
            edges.append(len(ids))
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        answers = sum(message["role"] == "assistant" for message in self._messages)
        if len(spans) != answers:
            raise TemplateMismatch(
                f"conversation {identity!r}: {template_name(self._tokenizer, self._options)} marks {len(spans)} spans "
                f"with {{% generation %}} for {answers} answers; correct the template ({_MISMATCH_FIX})"
            )
        return ids, spans

    def _marked_span(self, index: int, ids: list[int], mark: Span) -> Span:
        """The span of an answer within its mark, without what the assistant was given there or did not write.

        A mark that ends just before the eos token leaves out a token that the target does write: it is added.
        """
        whole, (start, end) = self._render(self._messages), mark
        characters = characters_of_tokens(whole, self._tokenizer)
        first, last = characters[start][0], characters[end - 1][1]
        prompt = self._prompt(index)
        given = whole.startswith(prompt) and len(prompt) > first
        first = len(prompt) if given else first
        found = self._locate(whole, self._probe(self._messages, index), (first, last), index)
        if given:
            start = self._after_prompt(whole, ids, len(prompt), found.first)
        if found.first > first:
            start = self._tokens(whole, ids, found.first)
        eos = self._tokenizer.eos_token_id
        if found.end < last:
            end = self._tokens(whole, ids, found.end)
        elif end < len(ids) and ids[end] == eos and eos not in ids[start:end]:
            end += 1
        if self.ids[:end] != ids[:end]:
            raise _Unclear(_LATER_TURNS)
        return start, end

    def _locate(self, text: str, probe: str, within: Span, index: int) -> "_Place":
        """Where the answer `index` lies in a rendering whose characters `within` hold it; `probe` is the same rendering
        with another text in place of the answer's."""
        start, limit = within
        message = self._messages[index]
        content, reasoning = message["content"].strip(), message.get(REASONING, "").strip()
        at = probe.find(_PROBE, start)
        if at < 0 or not text.endswith(probe[at + len(_PROBE) :]):
            raise _Unclear(_REWRITTEN)
        stop = len(text) - len(probe) + at + len(_PROBE)
        place = len(text[:stop].rstrip()) - len(content) if content else stop
        if text[max(place, 0) : place + len(content)] != content:
            raise _Unclear(_REWRITTEN)
        first = start
        if reasoning:
            if reasoning not in text[start:place]:
                raise _Unclear(f"its {REASONING} is not rendered")
        elif text[start:place].strip():
            # The template put something before a text that is all that the assistant is known to have written.
            first = place
        return _Place(first, place, self._end_of_turn(text, stop, limit))

    def _end_of_turn(self, text: str, start: int, limit: int) -> int:
        """Where the turn ends whose words end at `start`: after the first special tokens that follow them, which are
        several where a template closes more than the turn, and of these after the first eos token."""
        first = self._special.search(text, start, limit)
        if first is None:
            return limit
        end = first.end()
        while (following := self._special.match(text, end, limit)) and text[first.start() : end] != self._eos:
            first, end = following, following.end()
        return end

    # --- answers that were cut off ------------------------------------------------------------------------------------

    def _cut_text(self) -> str:
        """The text of a conversation up to the last word of its last answer.

        A template renders whole answers only: it would close a block of reasoning that the assistant did not close, or
        put an empty one before it. So the text goes after the generation prompt as it is. Reasoning that a server took
        out of the text is rendered, and the rendering ends with it.
        """
        *before, message = self._messages
        index, prompt = len(before), self._prompt(len(before))
        content, reasoning = message["content"], message.get(REASONING, "")
        if not reasoning.strip():
            if content.strip():
                self._check_beginning(prompt, content)
            return prompt + content
        whole = self._render(self._messages)
        if not whole.startswith(prompt):
            raise _Unclear(_NOT_AFTER_PROMPT)
        if content.strip():
            found = self._locate(whole, self._probe(self._messages, index), (len(prompt), len(whole)), index)
            return whole[: found.content] + content.lstrip()
        probe = self._probe(self._messages, index, REASONING)
        at = probe.find(_PROBE, len(prompt))
        if at < 0 or not whole.endswith(probe[at + len(_PROBE) :]):
            raise _Unclear(f"its {REASONING} is not rendered")
        spoken = whole[: len(whole) - len(probe) + at + len(_PROBE)].rstrip()
        if not spoken.endswith(reasoning.strip()):
            raise _Unclear(_REWRITTEN)
        return spoken.removesuffix(reasoning.strip()) + reasoning.lstrip()

    def _check_beginning(self, prompt: str, content: str) -> None:
        """Refuses an answer whose text does not say how it began: where special tokens were taken out of it, or where
        it repeats what the generation prompt ends with."""
        probe = self._probe(self._messages, len(self._messages) - 1)
        added = probe[len(prompt) : probe.find(_PROBE)] if probe.startswith(prompt) else ""
        if self._special.search(added) and not self._special.search(content):
            raise _Unclear(
                f"the template puts {added!r} before an answer, and the text of this one, which was cut off, does not "
                "show how it began"
            )
        opened = added_token_at_end(prompt, self._tokenizer)
        if opened and content.lstrip().startswith(opened):
            raise _Unclear(f"both the generation prompt ends and the answer, which was cut off, begins with {opened!r}")


class _Place(NamedTuple):
    """Where an answer lies in a rendering, in characters: the first that the assistant wrote, where its content begins,
    and the end of its end-of-turn token (where there is none: of the part of the rendering that was looked at)."""

    first: int
    content: int
    end: int
