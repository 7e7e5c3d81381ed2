"""Conversations from JSONL files, in the layouts that people keep them in."""

from pathlib import Path
from typing import Any

from draftsmith.data.chat import REASONING
from draftsmith.data.jsonl import RecordError, parse_records
from draftsmith.data.sample import Conversation

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
ANSWER_IDS = "answer_token_ids"
"""The key of a record under which the generated tokens of its answers are kept, one list an answer."""
LAYOUT_KEYS = ("messages", "conversations", "turns", "prompt")


def read_conversations(path: str | Path) -> list[Conversation]:
    """The training conversations of a JSONL file, in its order.

    A line holds `messages` ([{"role", "content"}, ...]) or `conversations` (ShareGPT: [{"from", "value"}, ...]), and
    perhaps `id` (otherwise FILESTEM-LINE), `finish_reason` ("length": the last answer was cut off) and
    `answer_token_ids` (the generated tokens of each answer). Other keys of the line are not read. DraftsmithError, with
    file and line: missing file, no line, bad JSON, another layout, unknown or misplaced roles, empty messages, ids used
    twice, and prompts without answers (`turns`).
    """
    return parse_records(Path(path), "conversation", _conversation)


def record_messages(record: dict[str, Any]) -> list[dict[str, str]]:
    """The checked chat messages of a record in the `messages` or the `conversations` layout (RecordError otherwise)."""
    layout = record_layout(record)
    if layout not in ("messages", "conversations"):
        raise RecordError(f"has {layout!r} where `messages` or `conversations` is wanted")
    if record.get("tools"):
        raise RecordError("has `tools`, which are not supported; leave such conversations out")
    raw = record[layout]
    if not isinstance(raw, list) or not raw:
        raise RecordError(f"{layout} is {_shorten(raw)}; it must be a list of at least one message")
    parse = _sharegpt_message if layout == "conversations" else _chat_message
    messages = [parse(message, f"{layout}[{index}]") for index, message in enumerate(raw)]
    _check_order(messages, layout)
    return messages


def record_layout(record: dict[str, Any]) -> str:
    """Which one of the layout keys a record has (RecordError: none, or several)."""
    found = [key for key in LAYOUT_KEYS if record.get(key) is not None]
    # Data sets with a `prompt` column beside `messages` repeat the first turn there; the messages hold it all.
    if "prompt" in found and len(found) > 1:
        found.remove("prompt")
    if len(found) == 1:
        return found[0]
    if found:
        raise RecordError(f"has {' and '.join(found)}; one of them must go")
    keys = ", ".join(sorted(map(str, record))) or "nothing"
    raise RecordError(f"unknown layout: found the keys {keys}; wanted one of {', '.join(LAYOUT_KEYS)}")


def _conversation(record: dict[str, Any], identity: str) -> Conversation:
    unanswered = "no answer to learn from; run `draftsmith regenerate` on this file first and train on its output"
    layout = record_layout(record)
    if layout in ("turns", "prompt"):
        raise RecordError(f"`{layout}` holds prompts only: {unanswered}")
    messages = record_messages(record)
    if all(message["role"] != "assistant" for message in messages):
        raise RecordError(f"{layout} has no assistant message: {unanswered}")
    return Conversation(
        identity,
        tuple(messages),
        finished=record.get("finish_reason") != "length",
        answer_ids=_answer_ids(record.get(ANSWER_IDS), messages),
    )


def _answer_ids(raw: Any, messages: list[dict[str, str]]) -> tuple[tuple[int, ...], ...]:
    if raw is None:
        return ()
    answers = sum(message["role"] == "assistant" for message in messages)
    if not isinstance(raw, list) or len(raw) != answers or not all(isinstance(ids, list) and ids for ids in raw):
        raise RecordError(
            f"{ANSWER_IDS} is {_shorten(raw)}; it must hold a list of token ids for each of {answers} answers"
        )
    for token in (token for ids in raw for token in ids):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RecordError(f"{ANSWER_IDS} holds {token!r}; token ids are integers from 0 on")
    return tuple(map(tuple, raw))


def _chat_message(message: Any, where: str) -> dict[str, str]:
    fields = _fields(message, where, ("role", "content"))
    role = fields["role"]
    if role not in ROLES:
        raise RecordError(f"{where}: role is {role!r}; allowed: {', '.join(ROLES)}")
    return fields


def _sharegpt_message(message: Any, where: str) -> dict[str, str]:
    fields = _fields(message, where, ("from", "value"))
    role = fields.pop("from")
    if role not in SHAREGPT_ROLES:
        raise RecordError(f"{where}: from is {role!r}; allowed: {', '.join(SHAREGPT_ROLES)}")
    return {"role": SHAREGPT_ROLES[role], "content": fields.pop("value"), **fields}


def _fields(message: Any, where: str, required: tuple[str, str]) -> dict[str, str]:
    """The text fields of one message. A key that is not understood is a fault, for it could change what is rendered
    (tool calls) or what is to be learnt (weights); empty ones are passed over."""
    if not isinstance(message, dict):
        raise RecordError(f"{where} is {_shorten(message)}; a message is an object with {' and '.join(required)}")
    known = (*required, REASONING)
    fields: dict[str, str] = {}
    for key in required:
        if key not in message:
            raise RecordError(f"{where}: has no {key!r}; found {', '.join(map(str, message)) or 'nothing'}")
    for key, value in message.items():
        if key not in known:
            if value in (None, [], {}):
                continue
            raise RecordError(f"{where}: key {key!r} is not supported; allowed: {', '.join(known)}")
        if key == REASONING and value is None:
            continue
        if not isinstance(value, str):
            raise RecordError(f"{where}: {key} is {_shorten(value)}; it must be text")
        fields[key] = value
    return fields


def _check_order(messages: list[dict[str, str]], layout: str) -> None:
    for index, message in enumerate(messages):
        role = message["role"]
        previous = messages[index - 1]["role"] if index else None
        if role == "system" and index:
            raise RecordError(f"{layout}[{index}]: a system message can only come first")
        if role == "assistant" and previous not in ("user", "tool"):
            place = f"right after {previous}" if previous else "at the start"
            raise RecordError(f"{layout}[{index}]: an assistant message {place}; it must follow a user or tool message")
        # An assistant may end its turn at once, which is an answer too; a blank question is a fault of the file.
        if role != "assistant" and not message["content"].strip():
            raise RecordError(f"{layout}[{index}]: the {role} message is empty")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
