"""Questions without answers: those of a file, and those that the package ships."""

from importlib import resources
from pathlib import Path
from typing import Any

from draftsmith.data.conversations import record_layout, record_messages
from draftsmith.data.jsonl import RecordError, parse_records
from draftsmith.data.named import DATA_SETS, is_named, named_prompts
from draftsmith.data.options import SHIPPED_PROMPTS
from draftsmith.data.prompt import Prompt, Split
from draftsmith.errors import DraftsmithError


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a JSONL file, in its order.

    A line holds `prompt` (text), `turns` (a list of texts), or `messages` or `conversations`, of which the questions
    are taken and the answers are not; and perhaps `id` (otherwise FILESTEM-LINE) and `category`. DraftsmithError, with
    file and line: missing file, no line, bad JSON, another layout, blank questions, ids used twice.
    """
    return parse_records(Path(path), "prompt", _prompt)


def find_prompts(source: str, split: Split) -> list[Prompt]:
    """The prompts that a recipe names: a JSONL file, or of that split `shipped` or a data set by name.

    DraftsmithError as `read_prompts` and `data.named.named_prompts`, and where there is neither file nor data set.
    """
    if source == SHIPPED_PROMPTS:
        return shipped_prompts(split)
    if is_named(source):
        return named_prompts(source, split)
    if not Path(source).exists():
        names = ", ".join((SHIPPED_PROMPTS, *DATA_SETS))
        raise DraftsmithError(
            f"{source}: there is no such file, nor prompts by that name; give a JSONL file, one of {names}, or "
            "NAME@FILE.jsonl for rows of such a data set"
        )
    return read_prompts(source)


def shipped_prompts(split: Split = "train") -> list[Prompt]:
    """The package's own prompts: `train` to learn from, `heldout` of the same kinds, other content, to measure on."""
    source = resources.files("draftsmith") / "data" / "prompts" / f"{split}.jsonl"
    with resources.as_file(source) as path:
        return read_prompts(path)


def _prompt(record: dict[str, Any], identity: str) -> Prompt:
    category = record.get("category")
    if category is not None and not isinstance(category, str):
        raise RecordError(f"category is {category!r}; it must be text")
    system = None
    layout = record_layout(record)
    if layout == "turns":
        turns = record["turns"]
    elif layout == "prompt":
        turns = [record["prompt"]]
    else:
        messages = record_messages(record)
        if any(message["role"] == "tool" for message in messages):
            raise RecordError("has tool messages, whose results cannot be asked for again; leave such lines out")
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        turns = [message["content"] for message in messages if message["role"] == "user"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise RecordError(f"{layout} holds {turns!r:.60}; wanted at least one question, each a text that is not blank")
    return Prompt(identity, tuple(turns), category, system)
