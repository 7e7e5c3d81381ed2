import json
from pathlib import Path

import pytest

from draftsmith.data.conversations import read_conversations
from draftsmith.data.prompts import read_prompts
from draftsmith.errors import DraftsmithError

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def error_of(path: Path, *records: object) -> str:
    with pytest.raises(DraftsmithError) as caught:
        read_conversations(write(path, *records))
    return str(caught.value)


def test_messages_layout(tmp_path: Path) -> None:
    system = {"role": "system", "content": "be kind"}
    path = write(
        tmp_path / "chats.jsonl",
        {"id": "a", "messages": [system, USER, ASSISTANT], "source": "somewhere"},
        {"id": 7, "messages": [USER, ASSISTANT, USER]},
    )
    first, second = read_conversations(path)
    assert (first.id, second.id) == ("a", "7")
    assert first.messages == (system, USER, ASSISTANT)
    assert first.finished
    assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]


def test_sharegpt_layout_gives_the_same_conversation(tmp_path: Path) -> None:
    sharegpt = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    path = write(tmp_path / "c.jsonl", {"id": 1, "conversations": sharegpt}, {"id": 2, "messages": [USER, ASSISTANT]})
    first, second = read_conversations(path)
    assert first.messages == second.messages


def test_ids_by_line_are_stable_over_blank_lines(tmp_path: Path) -> None:
    line = json.dumps({"messages": [USER, ASSISTANT]})
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    assert [conversation.id for conversation in read_conversations(path)] == ["chats-1", "chats-3"]


def test_an_answer_cut_off_is_known(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.jsonl",
        {"messages": [USER, ASSISTANT], "finish_reason": "length"},
        {"messages": [USER, ASSISTANT], "finish_reason": "stop"},
    )
    assert [conversation.finished for conversation in read_conversations(path)] == [False, True]


def test_generated_tokens_are_read_one_list_an_answer(tmp_path: Path) -> None:
    messages = [USER, ASSISTANT, USER, ASSISTANT]
    path = write(
        tmp_path / "c.jsonl", {"messages": messages, "answer_token_ids": [[3, 1], [4]]}, {"messages": messages}
    )
    assert [conversation.answer_ids for conversation in read_conversations(path)] == [((3, 1), (4,)), ()]
    for ids, message in (
        ([[3, 1]], "a list of token ids for each of 2 answers"),
        ([[3], []], "a list of token ids for each of 2 answers"),
        ([[3], "4"], "a list of token ids for each of 2 answers"),
        ([[3], [True]], "holds True; token ids are integers from 0 on"),
        ([[3], [-1]], "holds -1"),
    ):
        assert message in error_of(path, {"messages": messages, "answer_token_ids": ids})


def test_reasoning_is_kept_and_empty_extras_are_passed_over(tmp_path: Path) -> None:
    answer = {**ASSISTANT, "reasoning_content": "thus", "tool_calls": None}
    (conversation,) = read_conversations(write(tmp_path / "c.jsonl", {"messages": [USER, answer]}))
    assert conversation.messages[1] == {**ASSISTANT, "reasoning_content": "thus"}


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"nowhere\.jsonl: no such file"):
        read_conversations(tmp_path / "nowhere.jsonl")
    with pytest.raises(DraftsmithError, match="cannot be read"):
        read_conversations(tmp_path)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n", encoding="utf-8")
    with pytest.raises(DraftsmithError, match="holds no conversation"):
        read_conversations(empty)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"a": "é"}\n'.encode("latin-1"))
    with pytest.raises(DraftsmithError, match="not UTF-8"):
        read_conversations(latin)


def test_bad_json_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": [USER, ASSISTANT]}) + "\n{oops\n", encoding="utf-8")
    with pytest.raises(DraftsmithError, match=r"c\.jsonl:2: not valid JSON"):
        read_conversations(path)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (json.dumps({"messages": [{**USER, "content": "a \ud83d b"}, ASSISTANT]}), r"c\.jsonl:2: has '\\ud83d', half"),
        (json.dumps({"messages": [USER, ASSISTANT], "id": "\udc00"}), r"c\.jsonl:2: has '\\udc00', half"),
        ('{"id": ' + "9" * 5000 + "}", r"c\.jsonl:2: not valid JSON \(Exceeds"),
        ("[" * 100_000, r"c\.jsonl:2: not valid JSON \(maximum recursion"),
    ],
)
def test_lines_that_python_reads_but_nobody_can_use_are_named(tmp_path: Path, line: str, wanted: str) -> None:
    path = tmp_path / "c.jsonl"
    whole = json.dumps({"messages": [{**USER, "content": "\U0001f642 \ud83d\ude42"}, ASSISTANT]})
    path.write_text(whole + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(DraftsmithError, match=wanted):
        read_conversations(path)
    path.write_text(whole + "\n", encoding="utf-8")
    assert len(read_conversations(path)) == 1


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"text": "hi"}, "unknown layout: found the keys text"),
        ([1, 2], "a list, expected a JSON object"),
        ({"messages": []}, "messages is []"),
        ({"messages": "hi"}, "messages is 'hi'"),
        ({"messages": ["hi"]}, r"messages[0] is 'hi'"),
        ({"messages": [{"role": "user"}]}, "has no 'content'"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "content is ['a']; it must be text"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role is 'robot'; allowed: system, user"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, "from is 'robot'; allowed: human"),
        ({"messages": [ASSISTANT]}, "assistant message at the start"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "messages[2]: an assistant message right after assistant"),
        ({"messages": [USER, {"role": "system", "content": "x"}]}, "a system message can only come first"),
        ({"messages": [{"role": "user", "content": " "}, ASSISTANT]}, "the user message is empty"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0}]}, "key 'weight' is not supported"),
        ({"messages": [USER, ASSISTANT], "tools": [{}]}, "has `tools`"),
        ({"messages": [USER, ASSISTANT], "turns": ["hi"]}, "has messages and turns"),
        ({"id": "", "messages": [USER, ASSISTANT]}, "id is ''"),
        ({"turns": ["hi"]}, "draftsmith regenerate"),
        ({"prompt": "hi"}, "draftsmith regenerate"),
        ({"messages": [USER]}, "draftsmith regenerate"),
    ],
)
def test_faults_name_file_line_and_value(tmp_path: Path, record: object, wanted: str) -> None:
    message = error_of(tmp_path / "c.jsonl", {"messages": [USER, ASSISTANT]}, record)
    assert "c.jsonl:2: " in message
    assert wanted in message


def test_faults_are_gathered_and_duplicates_named(tmp_path: Path) -> None:
    good = {"id": "x", "messages": [USER, ASSISTANT]}
    message = error_of(tmp_path / "c.jsonl", good, good, *[{"nothing": 1}] * 9)
    assert "c.jsonl:2: id 'x' is already used on line 1" in message
    assert "c.jsonl:3: unknown layout" in message
    assert "and 5 more faulty lines" in message


def test_prompts_of_every_layout(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"id": "a", "turns": ["one", "two"], "category": "x"},
        {"prompt": "one"},
        {"messages": [{"role": "system", "content": "s"}, USER, ASSISTANT, {"role": "user", "content": "more"}]},
        {"conversations": [{"from": "human", "value": "hi"}]},
    )
    first, second, third, fourth = read_prompts(path)
    assert (first.id, first.turns, first.category) == ("a", ("one", "two"), "x")
    assert (second.id, second.turns, second.category) == ("p-2", ("one",), None)
    assert (third.turns, third.system) == (("hi", "more"), "s")
    assert (fourth.turns, fourth.system) == (("hi",), None)


@pytest.mark.parametrize(
    "record", [{"turns": []}, {"turns": ["a", " "]}, {"turns": "a"}, {"prompt": 3}, {"prompt": ""}]
)
def test_blank_prompts_are_refused(tmp_path: Path, record: object) -> None:
    with pytest.raises(DraftsmithError, match=r"p\.jsonl:1: .* wanted at least one question"):
        read_prompts(write(tmp_path / "p.jsonl", record))
