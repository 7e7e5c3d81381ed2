"""The file of answers: appended to durably, picked up where it stopped, in order when done."""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.base.files import replacing
from draftsmith.data.conversations import ANSWER_IDS
from draftsmith.data.jsonl import read_records
from draftsmith.data.prompts import Prompt
from draftsmith.errors import DraftsmithError, differences

_log = logging.getLogger(__name__)


class AnswerFile:
    """Answers in a JSONL file at `path`, and beside it the settings they were made with: whoever goes on with them asks
    here whether it may."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings_path = path.with_name(path.name + ".settings.json")

    def resume(self, settings: Mapping[str, Any], prompts: Sequence[Prompt]) -> set[str]:
        """The ids that are answered already. A last line that an interruption tore is dropped, with a warning.

        DraftsmithError: the file was made with other settings or from other prompts, or is damaged.
        """
        if self._empty:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _write_durably(self.settings_path, json.dumps(settings, indent=1) + "\n")
            return set()
        self.check(settings)
        self._drop_torn_line()
        by_id = {prompt.id: prompt for prompt in prompts}
        done: set[str] = set()
        for number, record in read_records(self.path):
            where = f"{self.path}:{number}"
            if not _is_answer(record):
                raise DraftsmithError(f"{where}: not an answer that regenerate wrote; {self._fix}")
            if record["id"] not in by_id:
                raise DraftsmithError(f"{where}: answers {record['id']!r}, which is not among the prompts; {self._fix}")
            answers = [message for message in record["messages"] if message.get("role") == "assistant"]
            if record["messages"] != by_id[record["id"]].conversation(answers):
                raise DraftsmithError(
                    f"{where}: {record['id']!r} was asked something else then (its turns, or its system message); "
                    f"{self._fix}"
                )
            if record["id"] in done:
                raise DraftsmithError(f"{where}: answers {record['id']!r} a second time; {self._fix}")
            done.add(record["id"])
        return done

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Adds records, on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(_line(record) for record in records)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Puts the answers in the prompts' order, under the categories that these have now, and returns them."""
        found = [record for _, record in read_records(self.path)]
        by_id = {record["id"]: record for record in found}
        ordered = [_as_asked(prompt, by_id[prompt.id]) for prompt in prompts]
        if found != ordered:
            _write_durably(self.path, "".join(_line(record) for record in ordered))
        return ordered

    @property
    def _empty(self) -> bool:
        return not self.path.exists() or self.path.stat().st_size == 0

    @property
    def _fix(self) -> str:
        return "write to another file (run=DIR), or remove this one to start over (--fresh)"

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise `DraftsmithError` where answers are there that were made with other values of these settings; those
        that are not given are not compared."""
        if self._empty:
            return
        try:
            found = json.loads(self.settings_path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DraftsmithError(
                f"{self.path} is there without {self.settings_path.name}, which says how its answers were made; "
                f"{self._fix}"
            ) from error
        except json.JSONDecodeError as error:
            raise DraftsmithError(f"{self.settings_path}: damaged ({error.msg}); {self._fix}") from error
        if not isinstance(found, dict):
            raise DraftsmithError(f"{self.settings_path}: damaged (it holds no settings); {self._fix}")
        wanted = json.loads(json.dumps(settings))
        compared = {name: value for name, value in found.items() if name in wanted}
        changes = [f"{name} was {then!r}, now {now!r}" for name, then, now in differences(compared, wanted)]
        if changes:
            raise DraftsmithError(
                f"{self.path} holds answers made with other settings: {'; '.join(changes)}; {self._fix}"
            )

    def _drop_torn_line(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole == len(content):
            return
        _log.warning("%s: dropped a torn last line of %d bytes", self.path, len(content) - whole)
        with self.path.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


def _is_answer(record: Any) -> bool:
    """Whether a line of the file is of the form that `answer_record` gives it, with at least one answer."""
    if not isinstance(record, dict) or not {"id", "messages", "finish_reason"} <= record.keys():
        return False
    messages = record["messages"]
    if not isinstance(record["id"], str) or not isinstance(messages, list):
        return False
    return all(isinstance(each, dict) for each in messages) and "assistant" in [each.get("role") for each in messages]


def answer_record(
    prompt: Prompt,
    messages: list[dict[str, str]],
    finish_reason: str,
    answer_ids: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """A line of the file: {id, category?, messages, answer_token_ids?, finish_reason}."""
    category = {} if prompt.category is None else {"category": prompt.category}
    ids = {} if answer_ids is None else {ANSWER_IDS: [list(ids) for ids in answer_ids]}
    return {"id": prompt.id, **category, "messages": messages, **ids, "finish_reason": finish_reason}


def _as_asked(prompt: Prompt, record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the file under the category that its prompt has now."""
    return answer_record(prompt, record["messages"], record["finish_reason"], record.get(ANSWER_IDS))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _write_durably(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())
