"""What a benchmark records: every timed round, every answer with every verify, and the texts that are shown.

These records are all that is kept; every figure (`figures.py`) follows from them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from draftsmith.blocks.accept import counted_verifies
from draftsmith.errors import DraftsmithError

PLAIN = "plain"
"""The decoder without a draft."""

VERSION = 4
"""Of the file format."""


class Record(BaseModel):
    """Base of the records: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AskedPrompt(Record):
    """A prompt that was measured. id: what answers and rounds call it; turns: the questions, as they were before any
    chat template; system: the prompt's own system message."""

    id: str
    turns: tuple[str, ...]
    category: str | None = None
    system: str | None = None


class Decoder(Record):
    """One way of decoding that was measured: `plain`, or a draft.

    proposals: tokens proposed a verify, 0 for plain decoding. memory_bytes: of its weights, caches and intermediate
    results on the GPU, at each batch size; empty on a CPU.
    """

    name: str
    directory: str | None = None
    method: str | None = None
    layers: int = 0
    block_size: int = 0
    proposals: int = 0
    engine: dict[str, Any] = {}
    memory_bytes: dict[int, int] = {}


class Round(Record):
    """The same turn of some prompts, decoded together and timed. seconds: from the request to the last token, the
    fastest of the repeats; first_token_seconds: of the same request for one token a row; tokens: new ones; cycles: the
    most verifies of a row, None where rows waited for others; prompts: ids."""

    decoder: str
    batch_size: int
    seed: int
    index: int
    turn: int
    prompts: list[str]
    seconds: float
    first_token_seconds: float
    tokens: int
    cycles: int | None


class BenchAnswer(Record):
    """One turn of one prompt by one decoder. token_ids: new ones; accept_lengths: tokens committed by each verify
    (plain decoding: ones). equal_tokens: how many stand at the same place in the plain answer, plain_tokens: how many
    that has (None when sampling). equal_at_width: for an answer that differs, whether it equals what the target says
    alone with as many tokens in a pass as the verify has; then the difference is one of rounding between shapes."""

    decoder: str
    batch_size: int
    seed: int
    prompt: str
    turn: int
    category: str | None
    prompt_tokens: int
    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: Literal["stop", "length"]
    equal_tokens: int | None = None
    plain_tokens: int | None = None
    equal_at_width: bool | None = None

    @property
    def counted(self) -> list[int]:
        """The verifies that the accept length is the mean of."""
        return counted_verifies(self.accept_lengths, self.finish_reason)


Came = Literal["prefill", "accepted", "corrected", "bonus", "ended"]
"""How a token came: with the prompt, drafted and accepted, in place of a refused proposal, after a whole block; or the
last of a sampled answer, of which the lengths do not tell whether it was drafted."""


class ShownToken(Record):
    """A token of a shown text. came: how. slot: 1-based place among the verify's proposals; the token after the
    accepted ones has the next. draft, target: the chance that either gave it (None: not known). instead: what the
    draft had proposed there, and its own chance of that."""

    text: str
    came: Came
    slot: int
    target: float | None = None
    draft: float | None = None
    instead: str | None = None
    instead_chance: float | None = None


class ShownText(Record):
    """A prompt's turn and the answer of one draft, token by token."""

    decoder: str
    prompt: str
    turn: int
    category: str | None
    question: str
    tokens: list[ShownToken]


class BenchReport(Record):
    """One benchmark, as written to `bench.json`. setting: what was measured where; decoders: `plain` first."""

    version: int = VERSION
    setting: dict[str, Any]
    prompts: list[AskedPrompt]
    decoders: list[Decoder]
    rounds: list[Round]
    answers: list[BenchAnswer]
    shown: list[ShownText] = []

    @property
    def drafts(self) -> list[Decoder]:
        """The decoders with a draft."""
        return [decoder for decoder in self.decoders if decoder.name != PLAIN]

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes measured, in their order."""
        return list(dict.fromkeys(round_.batch_size for round_ in self.rounds))

    def answers_of(self, decoder: str, batch_size: int) -> list[BenchAnswer]:
        """All answers of a decoder at a batch size, of all seeds."""
        return [a for a in self.answers if a.decoder == decoder and a.batch_size == batch_size]

    def rounds_of(self, decoder: str, batch_size: int) -> list[Round]:
        """All rounds of a decoder at a batch size, of all seeds, in the order of their (seed, index, turn)."""
        found = [r for r in self.rounds if r.decoder == decoder and r.batch_size == batch_size]
        return sorted(found, key=lambda r: (r.seed, r.index, r.turn))


def equal_tokens(left: list[int], right: list[int]) -> int:
    """How many places hold the same token in both."""
    return sum(a == b for a, b in zip(left, right, strict=False))


def lines(report: BenchReport) -> Iterator[str]:
    """The records as JSON Lines: each has a `kind`: `setting`, `prompt`, `decoder`, `round`, `answer`, `shown`."""
    yield json.dumps({"kind": "setting", "version": report.version, **report.setting}, ensure_ascii=False)
    kinds: tuple[tuple[str, list[Any]], ...] = (
        ("prompt", report.prompts),
        ("decoder", report.decoders),
        ("round", report.rounds),
        ("answer", report.answers),
        ("shown", report.shown),
    )
    for kind, records in kinds:
        for record in records:
            yield json.dumps({"kind": kind, **record.model_dump(mode="json")}, ensure_ascii=False)


def read_report(path: Path) -> BenchReport:
    """The report of a `bench.json`; raises `DraftsmithError` where there is none, or a damaged one."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DraftsmithError(f"{path} cannot be read ({error.strerror}); give a bench.json") from error
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(fields, dict):
        raise _damaged(path, f"it holds a {type(fields).__name__}")
    if fields.get("version") != VERSION:
        raise _damaged(path, f"its version is {fields.get('version')!r}, and this draftsmith reads {VERSION}")
    try:
        return BenchReport.model_validate({name: value for name, value in fields.items() if name != "summary"})
    except ValidationError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, reason: object) -> DraftsmithError:
    return DraftsmithError(
        f"{path} is not a report that this version of bench wrote ({reason}); remove it and run `draftsmith bench` "
        "again"
    )
