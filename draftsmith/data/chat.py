"""Chat templates: rendering messages as the target is served, stop tokens, and fingerprints for provenance."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from draftsmith.data.jsonl import lone_surrogate
from draftsmith.data.options import TEMPLATE_SYSTEM_PROMPT, DataOptions
from draftsmith.errors import DraftsmithError

Messages = Sequence[Mapping[str, str]]

REASONING = "reasoning_content"
"""The key of a message's reasoning, where it is not part of the content."""

# The names under which chat templates read a message's reasoning; of several, the first is given.
_REASONING_NAMES = (REASONING, "reasoning", "thinking")

# Cases on which tokenizers with equal vocabularies differ: normalisation, digits, spaces, byte fallback, added tokens.
PROBE_TEXT = "Hello  World\n\n\tdon't 12345 3.14 café naïve ﬁ 東京 🙂 <|im_end|></s> snake_case=CamelCase;\r\n"


def chat_template(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> str:
    """The template in use: the configured file's, else the tokenizer's own.

    DraftsmithError: there is none, or the tokenizer has several and none is the default, or the configured
    `enable_thinking` is unknown to the template.
    """
    template = options.chat_template_text
    if template is None:
        template = _own_template(tokenizer)
    if options.enable_thinking is not None and "enable_thinking" not in template:
        raise DraftsmithError(
            f"data.enable_thinking is {options.enable_thinking}, but {_name(tokenizer, template)} does not read "
            "`enable_thinking`; leave it unset"
        )
    return template


def with_system_prompt(messages: Messages, options: DataOptions) -> list[dict[str, str]]:
    """The messages as the template gets them: the configured system prompt first, where they have no system message."""
    prepared = [dict(message) for message in messages]
    if options.system_prompt != TEMPLATE_SYSTEM_PROMPT and prepared and prepared[0]["role"] != "system":
        prepared.insert(0, {"role": "system", "content": options.system_prompt})
    return prepared


def render_text(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, options: DataOptions, *, generation_prompt: bool
) -> str:
    """The rendered template as text. DraftsmithError: the template refuses the messages."""
    return str(_apply(messages, tokenizer, options, tokenize=False, add_generation_prompt=generation_prompt))


def render_ids(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, options: DataOptions, *, generation_prompt: bool
) -> list[int]:
    """The token ids of the rendered template. DraftsmithError: the template refuses the messages."""
    ids = _apply(messages, tokenizer, options, return_dict=False, add_generation_prompt=generation_prompt)
    return [int(token) for token in ids]


def render_prompt(messages: Messages, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> list[int]:
    """The token ids after which the assistant's next answer begins (the template's generation prompt included).

    DraftsmithError: no chat template, or the template refuses the messages.
    """
    return render_ids(messages, tokenizer, options, generation_prompt=True)


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of a rendered text, to which nothing is added."""
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def characters_of_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int]]:
    """[start, end) in the text of each of its tokens. The tokenizer must be a fast one."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [(int(start), int(end)) for start, end in encoded["offset_mapping"]]


def render_with_assistant_mask(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> tuple[list[int], list[bool]]:
    """Token ids, and which of them the template marks with {% generation %}.

    DraftsmithError: the tokenizer cannot map characters to tokens, or the template refuses the messages.
    """
    if not tokenizer.is_fast:
        raise DraftsmithError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, which {{% generation %}} in a chat template needs; "
            "give a template without it (data.chat_template)"
        )
    rendered = _apply(messages, tokenizer, options, return_dict=True, return_assistant_tokens_mask=True)
    return [int(token) for token in rendered["input_ids"]], [bool(flag) for flag in rendered["assistant_masks"]]


def answer_text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool = False) -> str:
    """An answer's tokens as text, every space as the tokens have it; `special_tokens`: by their names, or left out."""
    # Tokenizers may be set up to take spaces away before punctuation, and training would see another text.
    return str(
        tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False)
    )


def default_system_prompt(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> str | None:
    """The system prompt that the template adds to conversations without one; None where it adds nothing.

    Found by rendering one question with and without a system message: the text around the given system message is
    looked for before the bare question, and what stands between is the template's own.
    """
    if options.system_prompt != TEMPLATE_SYSTEM_PROMPT:
        return None
    question, system = "Draftsmith asks a question", "Draftsmith sets a rule"
    turn = {"role": "user", "content": question}
    try:
        given = render_text([{"role": "system", "content": system}, turn], tokenizer, options, generation_prompt=False)
    except DraftsmithError:
        return None  # the template has no system role, so it has no default for one
    bare = render_text([turn], tokenizer, options, generation_prompt=False)
    if system not in given or question not in given or question not in bare:
        return None
    before, after = given[: given.index(question)].split(system, 1)
    head = bare[: bare.index(question)]
    if not after or len(head) < len(before) + len(after) or not (head.startswith(before) and head.endswith(after)):
        return None
    # A template may open a system block of its own (a date, say) into which the given text goes: then nothing stands
    # between, and the block itself is what it adds.
    return head[len(before) : len(head) - len(after)].strip() or before.strip() or None


def stop_token_ids(tokenizer: PreTrainedTokenizerBase | None, generation_config: Any | None) -> tuple[int, ...]:
    """The ids that end an answer: the tokenizer's eos and the generation config's `eos_token_id` (one or several)."""
    ids: set[int] = set()
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    configured = getattr(generation_config, "eos_token_id", None)
    if configured is not None:
        ids.update(int(token) for token in (configured if isinstance(configured, Iterable) else (configured,)))
    return tuple(sorted(ids))


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that never come from plain text: the named special tokens and all added tokens marked special."""
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(map(int, (*tokenizer.all_special_ids, *added)))


def special_token_texts(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """A pattern for the special tokens as they are written in a rendered text."""
    return _any_of(str(tokenizer.convert_ids_to_tokens(token)) for token in special_token_ids(tokenizer))


def added_token_at_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The added token, special or not, with which a text ends before its last white space; None where it ends with
    other text."""
    added = _any_of(str(token) for token in tokenizer.added_tokens_decoder.values())
    last = re.search(rf"({added.pattern})\s*\Z", text)
    return None if last is None else last.group(1)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for the first of these texts, of several there the longest; for nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of what the tokenizer does: vocabulary, added and special tokens, and the ids of a probe text.

    Independent of the files it came from and of how a library version writes them.
    """
    return _sha256(
        {
            "vocab": sorted(tokenizer.get_vocab().items()),
            "added": sorted((int(i), str(token), token.special) for i, token in tokenizer.added_tokens_decoder.items()),
            "special": sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
            "probe": [int(token) for token in tokenizer.encode(PROBE_TEXT)],
        }
    )


def template_fingerprint(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> str:
    """sha256 of the template in use with its settings: text, system prompt, `enable_thinking`."""
    return _sha256(
        {
            "template": chat_template(tokenizer, options),
            "system_prompt": options.system_prompt,
            "enable_thinking": options.enable_thinking,
        }
    )


def template_name(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> str:
    """How errors name the template in use: whose it is, and the start of its sha256."""
    if options.chat_template is not None:
        return f"the chat template {options.chat_template} (sha256 {_short_hash(chat_template(tokenizer, options))})"
    return _name(tokenizer, chat_template(tokenizer, options))


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    own = tokenizer.chat_template
    if isinstance(own, str):
        return own
    fix = "give one with data.chat_template: FILE (a Jinja template)"
    if not own:
        raise DraftsmithError(
            f"the tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template; {fix}, or use an "
            "instruct model"
        )
    if "default" not in own:
        raise DraftsmithError(f"the tokenizer has the chat templates {', '.join(sorted(own))} and no default; {fix}")
    return str(own["default"])


def _apply(messages: Messages, tokenizer: PreTrainedTokenizerBase, options: DataOptions, **settings: Any) -> Any:
    if options.enable_thinking is not None:
        settings["enable_thinking"] = options.enable_thinking
    template = chat_template(tokenizer, options)
    for message in messages:
        for name, text in message.items():
            if fault := lone_surrogate(text):
                raise DraftsmithError(
                    f"the {name} of a {message['role']} message holds {fault}, half of a surrogate pair, which is no "
                    "character; mend the text"
                )
    prepared = [_as_read(message, template) for message in with_system_prompt(messages, options)]
    try:
        return tokenizer.apply_chat_template(prepared, chat_template=template, **settings)
    # A template is a program: its own faults are those of Python's operators.
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise DraftsmithError(f"{template_name(tokenizer, options)} refuses the messages: {error}") from error


def _as_read(message: dict[str, str], template: str) -> dict[str, str]:
    """A message with its reasoning under the name by which the template asks for it."""
    if REASONING not in message:
        return message
    read = (name for name in _REASONING_NAMES if re.search(rf"""\.{name}\b|['"]{name}['"]""", template))
    return {next(read, REASONING) if key == REASONING else key: text for key, text in message.items()}


def _name(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    return f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} (sha256 {_short_hash(template)})"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True, sort_keys=True).encode()).hexdigest()
