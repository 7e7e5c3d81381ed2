"""Prompts of well-known data sets by name, from the Hugging Face hub or from a local file in the same columns."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.base.paths import user_path
from draftsmith.data.jsonl import RecordError, parse_records
from draftsmith.data.prompt import Prompt, Split
from draftsmith.errors import DraftsmithError

_REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class DataSet:
    """Where a data set lies on the hub, and how a row becomes a prompt's turns and category.

    split: the rows to measure on; train_split: others, to learn from, where there are any; columns: those that a row
    must have as text; dialogues: the first is a list of texts, the turns.
    """

    path: str
    config: str | None
    split: str
    columns: tuple[str, ...]
    turns: Callable[[Mapping[str, Any]], list[str]]
    category: str | None = None
    train_split: str | None = None
    dialogues: bool = False


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]]


def _humaneval(row: Mapping[str, Any]) -> list[str]:
    return [
        f"Complete this Python function. Answer with the whole function.\n\n```python\n{row['prompt'].rstrip()}\n```"
    ]


DATA_SETS = {
    "gsm8k": DataSet(
        "openai/gsm8k",
        "main",
        "test",
        ("question",),
        lambda row: [row["question"] + _REASONING],
        train_split="train",
    ),
    "math500": DataSet(
        "HuggingFaceH4/MATH-500", None, "test", ("problem",), lambda row: [row["problem"] + _REASONING], "subject"
    ),
    "humaneval": DataSet("openai/openai_humaneval", None, "test", ("prompt",), _humaneval),
    "mbpp": DataSet(
        "google-research-datasets/mbpp",
        "sanitized",
        "test",
        ("prompt",),
        lambda row: [row["prompt"]],
        train_split="train",
    ),
    "mt-bench": DataSet(
        "HuggingFaceH4/mt_bench_prompts",
        None,
        "train",
        ("prompt",),
        lambda row: list(row["prompt"]),
        "category",
        dialogues=True,
    ),
    "alpaca": DataSet("tatsu-lab/alpaca", None, "train", ("instruction", "input"), _alpaca),
}


def is_named(source: str) -> bool:
    """Whether `source` names a data set (`gsm8k`), or a local file in the columns of one (`gsm8k@rows.jsonl`)."""
    return source.partition("@")[0] in DATA_SETS


def named_prompts(source: str, split: Split) -> list[Prompt]:
    """The prompts of a named data set, in its order, with ids NAME-ROW (from 1); of a local file (NAME@FILE) all rows.

    DraftsmithError: the data set has nothing but what is measured on, and `split` is `train`; the package `datasets`
    cannot be imported, the hub does not answer or breaks off, what came cannot be read, or a row has other columns than
    the data set's.
    """
    name, at, file = source.partition("@")
    if at and not file:
        raise DraftsmithError(f"{source!r} names no file after the @; give {name}@FILE.jsonl, or {name} alone")
    if at:
        return parse_records(user_path(file), "row", lambda row, identity: to_prompt(name, row, identity))
    return rows_to_prompts(name, _download(name, _hub_split(name, split)))


def _hub_split(name: str, split: Split) -> str:
    """What the hub calls the rows of `name` for this use."""
    found = DATA_SETS[name]
    if split == "heldout":
        return found.split
    if found.train_split is None:
        trained = ", ".join(other for other, data_set in DATA_SETS.items() if data_set.train_split is not None)
        raise DraftsmithError(
            f"the data set {name!r} is there to measure on, and what a draft learnt from cannot measure it; those with "
            f"rows to learn from are {trained}. To learn from rows of your choice in the same columns, "
            f"give them as {name}@FILE.jsonl, or a JSONL file of prompts"
        )
    return found.train_split


def rows_to_prompts(name: str, rows: Iterable[Mapping[str, Any]]) -> list[Prompt]:
    """Rows of the data set `name` as prompts."""
    try:
        return [to_prompt(name, row, f"{name}-{number}") for number, row in enumerate(rows, start=1)]
    except RecordError as error:
        raise DraftsmithError(f"data set {name}: {error}") from error


def to_prompt(name: str, row: Mapping[str, Any], identity: str) -> Prompt:
    """One row of the data set `name`; RecordError names the column that is missing or not text."""
    found = DATA_SETS[name]
    for column in found.columns:
        value = row.get(column)
        texts = [value]
        if found.dialogues:
            texts = list(value) if isinstance(value, list | tuple) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise RecordError(
                f"column {column!r} is {value!r:.60}; the columns of {name} are {', '.join(found.columns)}, each a "
                + ("list of texts, the turns" if found.dialogues else "text")
            )
    category = row.get(found.category) if found.category else None
    return Prompt(identity, tuple(found.turns(row)), str(category) if category else None)


def _download(name: str, split: str) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
        from huggingface_hub.errors import HTTPError
    except ImportError as error:
        raise DraftsmithError(
            f"the data set {name!r} comes through the package datasets, which cannot be imported ({error}): "
            f"pip install 'draftsmith[data]', or give a local file of its rows as {name}@FILE.jsonl"
        ) from error
    found = DATA_SETS[name]
    # OSError and ValueError: no connection, no such data set or split, neither there nor in the cache. HTTPError: the
    # hub's client, where a download breaks off. DatasetsError: files that cannot be read; its cause says why.
    errors = (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError)
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(found.path, found.config, split=split)
    except errors as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else None
        reason = f"{error}: {cause}" if cause else str(error)
        raise DraftsmithError(
            f"the data set {name!r} ({found.path}) cannot be loaded from the hub: {' '.join(reason.split())}; without "
            f"a network, give a local file of its rows as {name}@FILE.jsonl"
        ) from error
    return rows
