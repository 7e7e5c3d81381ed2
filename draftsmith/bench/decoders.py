"""The decoders of a benchmark: engines that stay, so that every one is warm, and what they record of themselves."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.bench.options import BenchOptions
from draftsmith.bench.records import PLAIN, Decoder
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.targets.target import Target

_TRIES = 3
"""Runs of a request until nothing had to be prepared: a graph is made at the second step of its shape."""


@dataclass(frozen=True)
class DraftEntry:
    """A draft to measure: its name in the report, where it was read from, and engine options of its own (None: those of
    the benchmark)."""

    name: str
    draft: Draft
    directory: Path | None = None
    options: EngineOptions | None = None

    def engine_options(self, common: EngineOptions) -> EngineOptions:
        """The options of its engine."""
        return self.options or common


@dataclass
class Timed:
    """What a request gave, and the seconds it took: to the last token, and, asked for one token a row, to the first."""

    generations: list[Generation]
    seconds: float
    first_token_seconds: float


@dataclass
class RunningDecoder:
    """A decoder at one batch size. memory_bytes: its weights, what building its engine took (built_bytes), and the most
    that its first run took beside that, on a GPU."""

    name: str
    target: Target
    engine: Engine
    built_bytes: int = 0
    memory_bytes: int | None = None
    _at_width: Engine | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, target: Target, entry: DraftEntry | None, engine: EngineOptions, batch_size: int, room: int | None = None
    ) -> "RunningDecoder":
        """entry None: plain decoding, which takes the engine options that do not concern a draft. room: tokens that the
        longest row may have (None: not known), so that a GPU's slots and graphs serve for all rounds."""
        common = engine if entry is None else entry.engine_options(engine)
        slots: dict[str, object] = {"slots": batch_size}
        if room is not None and common.max_length is None and _with_graphs(target, common):
            slots["max_length"] = min(room, target.max_position_embeddings)
        before = _allocated(target.device)
        if entry is None:
            decoder = cls(PLAIN, target, Engine(target, None, common.without_draft().model_copy(update=slots)))
        else:
            decoder = cls(entry.name, target, Engine(target, entry.draft, common.model_copy(update=slots)))
        decoder.built_bytes = _allocated(target.device) - before
        return decoder

    def timed(self, request: Request) -> Timed:
        """Decodes a request; raises `DraftsmithError` as the engine does.

        The prompts are read once before, untimed: what is new to kernels and products is slow the first time.
        """
        device = self.target.device
        measures = self.memory_bytes is None and device.type == "cuda"
        if measures:
            torch.cuda.reset_peak_memory_stats(device)
        before = _allocated(device)
        for_first = replace(request, max_new_tokens=1)
        self.engine.decode(for_first)
        generations, seconds = self._run(for_first)
        whole = seconds
        if request.max_new_tokens > 1:
            generations, whole = self._run(request)
            for _ in range(_TRIES - 1):
                if seconds < whole:
                    break
                seconds = min(seconds, self._run(for_first)[1])  # something disturbed the machine
        if measures:
            parts = (self.target.model, self.engine.draft)
            weights = sum(p.numel() * p.element_size() for part in parts if part is not None for p in part.parameters())
            self.memory_bytes = weights + self.built_bytes + torch.cuda.max_memory_allocated(device) - before
        return Timed(generations, whole, seconds)

    def at_same_width(self, request: Request) -> list[Generation]:
        """What the target says alone with as many tokens in a pass as this decoder's verify has; untimed."""
        if self._at_width is None:
            alone = self.engine.options.without_draft().model_copy(update={"verify_width": self.engine.width})
            self._at_width = Engine(self.target, None, alone)
        return self._at_width.decode(request)

    def _run(self, request: Request) -> tuple[list[Generation], float]:
        """The generations and the seconds they took; taken again where slots or graphs had to be made first."""
        for _ in range(_TRIES):
            before = self.engine.preparations
            self._wait()
            start = time.perf_counter()
            generations = self.engine.decode(request)
            self._wait()
            seconds = time.perf_counter() - start
            if self.engine.preparations == before or not _with_graphs(self.target, self.engine.options):
                break
        return generations, seconds

    def _wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _with_graphs(target: Target, options: EngineOptions) -> bool:
    return target.device.type == "cuda" and options.graphs != "off"


def proposals(draft: Draft, options: EngineOptions) -> int:
    """Tokens that the engine has a draft propose a verify."""
    return options.num_proposals or algorithm_for(draft.config).num_proposals(draft.config)


def describe(entry: DraftEntry, common: EngineOptions, memory_bytes: dict[int, int]) -> Decoder:
    """The decoder's record; common: engine options of drafts that have none of their own."""
    config, engine = entry.draft.config, entry.engine_options(common)
    return Decoder(
        name=entry.name,
        directory=None if entry.directory is None else str(entry.directory),
        method=config.architecture,
        layers=config.num_hidden_layers,
        block_size=0 if config.block is None else config.block.size,
        proposals=proposals(entry.draft, engine),
        engine=engine.model_dump(mode="json", exclude_defaults=True),
        memory_bytes=memory_bytes,
    )


def request(
    prompts: Sequence[Sequence[int]], seeds: Sequence[int], options: BenchOptions, stop_token_ids: Sequence[int]
) -> Request:
    """The benchmark's request for these prompts (token ids), a seed each."""
    return Request.of(
        prompts,
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingOptions.of(options),
        stop_token_ids=stop_token_ids,
        seed=seeds,
    )
