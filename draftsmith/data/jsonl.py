"""JSON Lines with errors that name the file and the line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.errors import DraftsmithError

PROBLEMS_SHOWN = 5

Parsed = TypeVar("Parsed")


class RecordError(DraftsmithError):
    """A fault of one record; the reader adds the file and the line."""


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """The JSON values of a JSONL file with their 1-based line numbers; blank lines are passed over.

    DraftsmithError: the file is missing or unreadable, or a line is not JSON.
    """
    try:
        file = path.open(encoding="utf-8")
    except FileNotFoundError as error:
        raise DraftsmithError(f"{path}: no such file; give a JSONL file, one JSON object a line") from error
    except OSError as error:
        raise DraftsmithError(f"{path}: cannot be read ({error.strerror}); give a JSONL file") from error
    with file:
        lines = enumerate(file, start=1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise DraftsmithError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, a number of too many digits, or nested too deep
                where = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise DraftsmithError(
                    f"{path}:{number}: not valid JSON ({where}); "
                    "each line must hold one whole JSON object (a JSON array: `jq -c '.[]' IN.json > OUT.jsonl`)"
                ) from error
            if fault := lone_surrogate(line if "\\u" not in line else json.dumps(record, ensure_ascii=False)):
                raise DraftsmithError(
                    f"{path}:{number}: has {fault}, half of a surrogate pair, which is no character; mend the text, or "
                    "leave the line out"
                )
            yield number, record


def lone_surrogate(text: str) -> str | None:
    """The first code point of `text` that no encoding has a place for, as an escape; None where all are characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return ascii(text[error.start])
    return None


def parse_records(path: Path, kind: str, parse: Callable[[dict[str, Any], str], Parsed]) -> list[Parsed]:
    """Parses every record of a JSONL file: `parse(record, id)` with the record's `id`, or FILESTEM-LINE without one.

    `parse` raises `RecordError` for a faulty record. All faults are gathered into one error that shows the first few,
    so that a file can be mended in one go. DraftsmithError: also for an empty file and for ids used twice.
    """
    parsed: list[Parsed] = []
    problems: list[str] = []
    line_of_id: dict[str, int] = {}
    for number, record in read_records(path):
        try:
            if not isinstance(record, dict):
                raise RecordError(f"a {type(record).__name__}, expected a JSON object")
            identity = record_id(record, f"{path.stem}-{number}")
            if identity in line_of_id:
                raise RecordError(f"id {identity!r} is already used on line {line_of_id[identity]}; ids must be unique")
            line_of_id[identity] = number
            parsed.append(parse(record, identity))
        except RecordError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        shown = "\n".join(problems[:PROBLEMS_SHOWN])
        more = f"\n... and {len(problems) - PROBLEMS_SHOWN} more faulty lines" if len(problems) > PROBLEMS_SHOWN else ""
        raise DraftsmithError(shown + more)
    if not parsed:
        raise DraftsmithError(f"{path}: holds no {kind}; it needs at least one line")
    return parsed


def record_id(record: dict[str, Any], default: str) -> str:
    """The record's `id` as text, `default` where it has none."""
    identity = record.get("id", default)
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise RecordError(f"id is {identity!r}; it must be a non-empty string or an integer")
    return str(identity)
