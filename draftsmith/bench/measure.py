"""Runs drafts against plain decoding of the same target, in one process, in turn, and records what they did."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.base.progress import Progress, SilentProgress, Stage
from draftsmith.bench.chat import Chat
from draftsmith.bench.decoders import DraftEntry, RunningDecoder, Timed, describe, proposals, request
from draftsmith.bench.figures import all_figures
from draftsmith.bench.machine import machine
from draftsmith.bench.options import BenchOptions
from draftsmith.bench.page import render_page
from draftsmith.bench.records import (
    PLAIN,
    AskedPrompt,
    BenchAnswer,
    BenchReport,
    Decoder,
    Round,
    ShownText,
    equal_tokens,
    lines,
)
from draftsmith.bench.shown import show
from draftsmith.data.prompts import Prompt
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.rng import row_seeds
from draftsmith.errors import DraftsmithError
from draftsmith.targets.target import Target

_log = logging.getLogger(__name__)


def bench(
    target: Target,
    drafts: Sequence[DraftEntry],
    prompts: Sequence[Prompt],
    options: BenchOptions,
    chat: Chat,
    engine: EngineOptions | None = None,
    *,
    stop_token_ids: Sequence[int] = (),
    progress: Progress | None = None,
) -> BenchReport:
    """Measures every draft and plain decoding on all prompts and all their turns.

    A round is one turn of `batch_size * rows_waiting` prompts. All decoders decode it one after the other, and which
    goes first moves on from round to round, so that none owns the warmer machine; `options.warmup` rounds come before,
    untimed. What plain decoding answered becomes the history of the next turn for every decoder: all of them answer the
    same prompts. Sampled rows have a seed for each prompt, whatever the batch. engine: its options (None: the
    defaults), of which plain decoding takes those that concern it. Raises `DraftsmithError` when there is no prompt, no
    draft, or a name is used twice.
    """
    _check(drafts, prompts)
    for size in options.batch_size:
        if size > len(prompts):
            _log.warning(
                "bench.batch_size has %d, and there are %d prompts: no more rows than that are decoded side by side",
                size,
                len(prompts),
            )
    engine = engine or EngineOptions()
    run = _Bench(target, drafts, prompts, options, engine, chat, tuple(stop_token_ids))
    with (progress or SilentProgress()).stage("Bench", total=run.total, unit="answers") as stage:
        for batch_size in options.batch_size:
            run.measure(batch_size, stage)
    return BenchReport(
        setting=_setting(target, options, engine),
        prompts=[AskedPrompt(id=p.id, turns=p.turns, category=p.category, system=p.system) for p in prompts],
        decoders=[
            Decoder(name=PLAIN, memory_bytes=run.memory.get(PLAIN, {})),
            *(describe(entry, engine, run.memory.get(entry.name, {})) for entry in drafts),
        ],
        rounds=run.rounds,
        answers=run.answers,
        shown=list(run.shown()),
    )


def write_benchmark(report: BenchReport, json_path: Path, lines_path: Path, page_path: Path) -> None:
    """Writes `bench.json` (figures and records), `bench.jsonl` (the records, one a line) and the HTML page."""
    json_path.parent.mkdir(parents=True, exist_ok=True)
    figures = [figures.to_json() for figures in all_figures(report)]
    content = {"summary": figures, **report.model_dump(mode="json")}
    lines_path.write_text("".join(f"{line}\n" for line in lines(report)), encoding="utf-8")
    page_path.write_text(render_page(report), encoding="utf-8")
    json_path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _check(drafts: Sequence[DraftEntry], prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise DraftsmithError("bench has no prompts; name a JSONL file with at least one prompt in `bench.prompts`")
    if not drafts:
        raise DraftsmithError("bench has no draft to measure; give at least one with --draft")
    names = [PLAIN, *(entry.name for entry in drafts)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DraftsmithError(f"two decoders are called {twice!r}; give their directories different names")


@dataclass(frozen=True)
class _Turn:
    """One round to decode: which turn of which prompts (indices), in a sampling seed's run."""

    seed: int
    index: int
    turn: int
    members: list[int]
    prompt_ids: list[list[int]]


class _Bench:
    """The records in the making."""

    def __init__(
        self,
        target: Target,
        drafts: Sequence[DraftEntry],
        prompts: Sequence[Prompt],
        options: BenchOptions,
        engine: EngineOptions,
        chat: Chat,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self.target, self.drafts, self.prompts = target, drafts, prompts
        self.options, self.engine, self.chat, self.stop_token_ids = options, engine, chat, stop_token_ids
        self.rounds: list[Round] = []
        self.answers: list[BenchAnswer] = []
        self.memory: dict[str, dict[int, int]] = {}
        self._shown_prompts: dict[tuple[int, int], list[int]] = {}

    @property
    def total(self) -> int:
        """Answers to come, of all decoders."""
        turns = sum(len(prompt.turns) for prompt in self.prompts)
        return turns * len(self.options.batch_size) * len(self.options.seed) * (1 + len(self.drafts))

    def measure(self, batch_size: int, stage: Stage) -> None:
        """All rounds at one batch size."""
        everyone: list[DraftEntry | None] = [None, *self.drafts]
        decoders = [RunningDecoder.of(self.target, one, self.engine, batch_size, self._room) for one in everyone]
        first = self._first_round(batch_size)
        for _ in range(self.options.warmup):
            for decoder in decoders:
                decoder.timed(self._request(first))
        for number, (turn, histories) in enumerate(self._turns(batch_size)):
            fastest: dict[str, Timed] = {}
            for repeat in range(self.options.repeats):
                at = (number + repeat) % len(decoders)
                for decoder in decoders[at:] + decoders[:at]:
                    timed = decoder.timed(self._request(turn))
                    if decoder.name not in fastest or timed.seconds < fastest[decoder.name].seconds:
                        fastest[decoder.name] = timed
            plain = fastest[PLAIN]
            for member, generation in zip(turn.members, plain.generations, strict=True):
                histories[member].append(generation.token_ids)
            for decoder in decoders:
                self._record(decoder, batch_size, turn, fastest[decoder.name], plain)
            committed = [n for a in self.answers if a.decoder != PLAIN for n in a.counted]
            shown = f"{sum(committed) / len(committed):.2f}" if committed else "-"
            stage.advance(len(turn.members) * len(decoders), accept=shown)
        for decoder in decoders:
            if decoder.memory_bytes is not None:
                self.memory.setdefault(decoder.name, {})[batch_size] = decoder.memory_bytes

    def shown(self) -> Iterator[ShownText]:
        """The texts of the report: of the first batch size and seed, every draft's answers to the first prompts."""
        size, seed = self.options.batch_size[0], self.options.seed[0]
        index = {prompt.id: number for number, prompt in enumerate(self.prompts)}
        entries = {entry.name: entry for entry in self.drafts}
        for answer in self.answers:
            number = index[answer.prompt]
            if answer.decoder == PLAIN or answer.batch_size != size or answer.seed != seed:
                continue
            if number >= self.options.shown:
                continue
            prompt_ids = self._shown_prompts[number, answer.turn]
            question = self.prompts[number].turns[answer.turn]
            entry = entries[answer.decoder]
            most = proposals(entry.draft, entry.engine_options(self.engine))
            yield show(self.target, entry, self.options, self.chat, question, prompt_ids, answer, most)

    @property
    def _room(self) -> int:
        """Tokens that the longest conversation has at most: answers may take more tokens when they are read again."""
        answer = 32 + 3 * self.options.max_new_tokens // 2
        questions = (
            (sum(len(self._ids(number, turn, [])) for turn in range(len(prompt.turns))), len(prompt.turns))
            for number, prompt in enumerate(self.prompts)
        )
        return max(asked + turns * answer for asked, turns in questions)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _chunks(self, batch_size: int) -> list[list[int]]:
        size = batch_size * self.options.rows_waiting
        return [list(range(i, min(i + size, len(self.prompts)))) for i in range(0, len(self.prompts), size)]

    def _first_round(self, batch_size: int) -> _Turn:
        members = self._chunks(batch_size)[0]
        return _Turn(self.options.seed[0], 0, 0, members, [self._ids(m, 0, []) for m in members])

    def _turns(self, batch_size: int) -> Iterator[tuple[_Turn, dict[int, list[list[int]]]]]:
        """Every round in order, with the answers so far of each prompt, which the caller completes."""
        for seed in self.options.seed:
            for index, chunk in enumerate(self._chunks(batch_size)):
                histories: dict[int, list[list[int]]] = {member: [] for member in chunk}
                for turn in range(max(len(self.prompts[member].turns) for member in chunk)):
                    members = [member for member in chunk if turn < len(self.prompts[member].turns)]
                    ids = [self._ids(member, turn, histories[member]) for member in members]
                    if seed == self.options.seed[0] and batch_size == self.options.batch_size[0]:
                        self._shown_prompts.update({(m, turn): row for m, row in zip(members, ids, strict=True)})
                    yield _Turn(seed, index, turn, members, ids), histories

    def _ids(self, member: int, turn: int, answers: list[list[int]]) -> list[int]:
        return self.chat.prompt_ids(self.prompts[member], turn, answers)

    def _request(self, turn: _Turn) -> Request:
        seeds = row_seeds(turn.seed, len(self.prompts))
        return request(turn.prompt_ids, [seeds[m] for m in turn.members], self.options, self.stop_token_ids)

    def _record(self, decoder: RunningDecoder, batch_size: int, turn: _Turn, timed: Timed, plain: Timed) -> None:
        generations = timed.generations
        waited = len(turn.members) > batch_size
        self.rounds.append(
            Round(
                decoder=decoder.name,
                batch_size=batch_size,
                seed=turn.seed,
                index=turn.index,
                turn=turn.turn,
                prompts=[self.prompts[member].id for member in turn.members],
                seconds=timed.seconds,
                first_token_seconds=timed.first_token_seconds,
                tokens=sum(len(generation.token_ids) for generation in generations),
                cycles=None if waited else max(len(generation.accept_lengths) for generation in generations),
            )
        )
        compared = self.options.temperature == 0.0 and decoder.name != PLAIN
        references = plain.generations
        differs = [one.token_ids != other.token_ids for one, other in zip(generations, references, strict=True)]
        at_width = decoder.at_same_width(self._request(turn)) if compared and any(differs) else references
        for row, (member, generation, reference) in enumerate(zip(turn.members, generations, references, strict=True)):
            self.answers.append(
                BenchAnswer(
                    decoder=decoder.name,
                    batch_size=batch_size,
                    seed=turn.seed,
                    prompt=self.prompts[member].id,
                    turn=turn.turn,
                    category=self.prompts[member].category,
                    prompt_tokens=len(turn.prompt_ids[row]),
                    token_ids=generation.token_ids,
                    accept_lengths=generation.accept_lengths,
                    finish_reason=generation.finish_reason,
                    equal_tokens=equal_tokens(reference.token_ids, generation.token_ids) if compared else None,
                    plain_tokens=len(reference.token_ids) if compared else None,
                    equal_at_width=at_width[row].token_ids == generation.token_ids
                    if compared and differs[row]
                    else None,
                )
            )


def _setting(target: Target, options: BenchOptions, engine: EngineOptions) -> dict[str, Any]:
    return {
        "target": str(target.source),
        "dtype": str(target.dtype).removeprefix("torch."),
        **machine(target.device),
        **options.model_dump(mode="json"),
        "engine": engine.model_dump(mode="json"),
    }
