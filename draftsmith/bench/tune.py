"""Finds the block size, the number of proposals and the trimming threshold that decode fastest.

Two things decide the tokens per second: what a verify commits, and what a cycle costs. The first depends on text and
draft, not on the machine: acceptance is recorded once at every anchor of the target's own answers (`anchors.py`), for
each block size, and any number of proposals or threshold is replayed on it. The second depends on the machine and the
shapes, not on the text: it is measured once for each pair of block size and proposals.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.bench.anchors import Anchored, anchored, replay
from draftsmith.bench.decoders import DraftEntry, RunningDecoder, request
from draftsmith.bench.options import BenchOptions
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.tuning import Tuning
from draftsmith.drafts.config import DraftConfigError
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.progress import Progress, SilentProgress
from draftsmith.targets.target import Target

Trim = tuple[str, float]


@dataclass(frozen=True)
class Shape:
    """What a cycle's cost depends on: slots of a block, and proposals that are verified."""

    block_size: int
    num_proposals: int


@dataclass(frozen=True)
class Candidate:
    """One choice of settings and what is expected of it. trim: the trimming option and its value, or None."""

    shape: Shape
    trim: Trim | None
    accept_length: float
    cycle_seconds: float
    tokens_per_second: float

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self.shape), "trim": self.trim and dict([self.trim])} | {
            name: round(getattr(self, name), 6) for name in ("accept_length", "cycle_seconds", "tokens_per_second")
        }


def candidates(
    texts: Mapping[int, Sequence[Anchored]],
    cycle_seconds: Mapping[Shape, float],
    trims: Sequence[Trim] = (),
    *,
    batch_size: int = 1,
) -> list[Candidate]:
    """Every choice of a measured shape and a trimming value, fastest first.

    texts: block size -> acceptance at the anchors of the same texts; cycle_seconds: of each shape, for `batch_size`
    rows. Of equal speeds, the one with fewer proposals and without trimming comes first. Raises `DraftsmithError`
    where the texts hold no whole verify.
    """
    found = []
    for shape, seconds in cycle_seconds.items():
        for trim in (None, *trims):
            lengths = [n for text in texts[shape.block_size] for n in replay(text, shape.num_proposals, trim)[:-1]]
            if not lengths:
                raise DraftsmithError(
                    "the answers are too short to hold a whole verify; raise bench.max_new_tokens, or give other "
                    "prompts"
                )
            length = sum(lengths) / len(lengths)
            found.append(Candidate(shape, trim, length, seconds, batch_size * length / seconds))
    plain_first = sorted(found, key=lambda c: (c.shape.num_proposals, c.shape.block_size, c.trim is not None))
    return sorted(plain_first, key=lambda c: -c.tokens_per_second)


def shapes(draft: Draft, block_sizes: Sequence[int] | None = None) -> list[Shape]:
    """The shapes to measure: the trained block size and three quarters, half and a quarter of it, each with all of its
    proposals and with three quarters, half and a quarter of them.

    Sizes that the draft's head has no room in are left out, unless `block_sizes` asks for them, which is an error.
    """
    trained = draft.config.block_size
    wanted = block_sizes or sorted({max(2, round(trained * share)) for share in (1, 0.75, 0.5, 0.25)}, reverse=True)
    found = []
    for size in wanted:
        try:
            view = draft.with_block_size(size)
            most = algorithm_for(view.config).block_layout(view.config).max_proposals
        except DraftConfigError:
            if block_sizes:
                raise
            continue
        found += [Shape(size, n) for n in sorted({max(1, round(most * s)) for s in (1, 0.75, 0.5, 0.25)}, reverse=True)]
    return found


def tune(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    options: BenchOptions,
    *,
    stop_token_ids: Sequence[int] = (),
    block_sizes: Sequence[int] | None = None,
    progress: Progress | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Tuning:
    """Measures and chooses, for greedy decoding of `prompts` (token ids) at the first of `options.batch_size`.

    block_sizes: those to try (None: `shapes` says). Raises `DraftsmithError` for no prompts, or sampling options.
    """
    if not prompts:
        raise DraftsmithError("tune has no prompts; name some in `bench.prompts`")
    if options.temperature > 0:
        raise DraftsmithError(
            f"bench.temperature is {options.temperature}, and tuning replays greedy answers; set it to 0"
        )
    batch_size, method = options.batch_size[0], algorithm_for(draft.config)
    offered = {name: values for name, values in method.trimming_options.items() if method.can_trim(draft, name)}
    trims = [(name, value) for name, values in offered.items() for value in values]
    tried = shapes(draft, block_sizes)
    rows = [list(prompt) for prompt in prompts]
    sizes = list(dict.fromkeys(shape.block_size for shape in tried))
    with (progress or SilentProgress()).stage("Tune", total=2 + len(sizes) + len(tried), unit="steps") as stage:
        plain = RunningDecoder.of(target, None, options, batch_size)
        ask = request(rows, [0] * len(rows), options, stop_token_ids)
        answers = [generation.token_ids for generation in plain.timed(ask).generations]
        stage.advance()
        texts: dict[int, list[Anchored]] = {}
        for size in sizes:
            view = draft.with_block_size(size)
            texts[size] = [anchored(target, view, p, a, trims) for p, a in zip(rows, answers, strict=True)]
            stage.advance()
        few = request(rows[:batch_size], [0] * len(rows[:batch_size]), options, stop_token_ids)
        plain_seconds = _cycle_seconds(plain, few, options.repeats)
        stage.advance()
        seconds: dict[Shape, float] = {}
        for shape in tried:
            engine = options.engine.model_copy(update={"num_proposals": shape.num_proposals})
            entry = DraftEntry("tuned", draft.with_block_size(shape.block_size), options=engine)
            decoder = RunningDecoder.of(target, entry, options, batch_size)
            seconds[shape] = _cycle_seconds(decoder, few, options.repeats)
            stage.advance()
    ranked = candidates(texts, seconds, trims, batch_size=batch_size)
    best = ranked[0]
    plain_speed = batch_size / plain_seconds
    for line in _lines(ranked, plain_speed):
        say(line)
    chosen = EngineOptions(
        num_proposals=best.shape.num_proposals, proposer={} if best.trim is None else dict([best.trim])
    )
    return Tuning(
        method=draft.config.architecture,
        trained_block_size=draft.config.block_size,
        block_size=best.shape.block_size,
        engine=chosen,
        found={
            "target": str(target.source),
            "device": str(target.device),
            "batch_size": batch_size,
            "prompts": len(rows),
            "plain_tokens_per_second": round(plain_speed, 3),
            "candidates": [candidate.to_json() for candidate in ranked],
        },
    )


def _cycle_seconds(decoder: RunningDecoder, ask: Any, repeats: int) -> float:
    """Seconds of one cycle: the fastest of the repeats, after one run to warm up."""
    decoder.timed(ask)
    found = []
    for _ in range(max(repeats, 2)):
        timed = decoder.timed(ask)
        cycles = max(len(generation.accept_lengths) for generation in timed.generations)
        if cycles == 0:
            raise DraftsmithError("the answers are one token long; raise bench.max_new_tokens, or give other prompts")
        found.append((timed.seconds - timed.first_token_seconds) / cycles)
    return min(found)


def _lines(ranked: Sequence[Candidate], plain_speed: float) -> Iterable[str]:
    for place, found in enumerate(ranked[:5], start=1):
        trim = "" if found.trim is None else f", {found.trim[0]} {found.trim[1]}"
        yield (
            f"{place}. blocks of {found.shape.block_size}, {found.shape.num_proposals} proposals{trim}: "
            f"{found.tokens_per_second:,.1f} tokens/s ({found.tokens_per_second / plain_speed:.2f} times plain), "
            f"accept length {found.accept_length:.2f}, {found.cycle_seconds * 1e3:.2f} ms a cycle"
        )
