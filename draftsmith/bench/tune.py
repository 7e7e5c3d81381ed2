"""Finds the block size, of a draft with blocks, and the number of proposals that decode fastest.

Two things decide the tokens per second: what a verify commits, and what a cycle costs. The first depends on text and
draft, not on the machine: acceptance is recorded once at every anchor of the target's own answers (`anchors.py`), for
each block size, and any number of proposals is replayed on it. The second depends on the machine and the shapes, not on
the text: it is measured once for each pair of block size and proposals.

Options that leave proposals out (`Algorithm.trimming_options`) are not tried, and refused: a verify has one width
whatever it is given, so with fewer proposals a cycle costs the same and commits no more. Such an option can only lose.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.algorithms.registry import algorithm_for
from draftsmith.base.progress import Progress, SilentProgress
from draftsmith.bench.anchors import Anchored, anchored, replay
from draftsmith.bench.decoders import DraftEntry, RunningDecoder, request
from draftsmith.bench.options import BenchOptions
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Request
from draftsmith.decoding.tuning import Tuning, block_size_of, sized
from draftsmith.drafts.config import DraftConfigError
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.target import Target


@dataclass(frozen=True)
class Shape:
    """What a cycle's cost depends on: slots of a block (None: the draft has none), and proposals that are verified."""

    block_size: int | None
    num_proposals: int

    def of(self, draft: Draft) -> Draft:
        """The draft with blocks of this size."""
        return sized(draft, self.block_size)


@dataclass(frozen=True)
class Candidate:
    """One choice of settings and what is expected of it."""

    shape: Shape
    accept_length: float
    cycle_seconds: float
    tokens_per_second: float

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self.shape) | {
            name: round(getattr(self, name), 6) for name in ("accept_length", "cycle_seconds", "tokens_per_second")
        }


def candidates(
    texts: Mapping[int | None, Sequence[Anchored]],
    cycle_seconds: Mapping[Shape, float],
    *,
    batch_size: int = 1,
) -> list[Candidate]:
    """Every measured shape, fastest first.

    texts: block size -> acceptance at the anchors of the same texts; cycle_seconds: of each shape, for `batch_size`
    rows. Of equal speeds, the one with fewer proposals comes first. Raises `DraftsmithError` where the texts hold no
    whole verify.
    """
    found = []
    for shape, seconds in cycle_seconds.items():
        lengths = [n for text in texts[shape.block_size] for n in replay(text, shape.num_proposals)[:-1]]
        if not lengths:
            raise DraftsmithError(
                "the answers are too short to hold a whole verify; raise bench.max_new_tokens, or give other prompts"
            )
        length = sum(lengths) / len(lengths)
        found.append(Candidate(shape, length, seconds, batch_size * length / seconds))
    return sorted(found, key=lambda c: (-c.tokens_per_second, c.shape.num_proposals, c.shape.block_size or 0))


def shapes(draft: Draft, block_sizes: Sequence[int] | None = None) -> list[Shape]:
    """The shapes to measure: the trained block size and three quarters, half and a quarter of it, each with all of its
    proposals and with three quarters, half and a quarter of them.

    Sizes that the draft's head has no room in are left out, unless `block_sizes` asks for them, which is an error.
    """
    found = []
    for size in block_sizes or _sizes(draft):
        try:
            view = sized(draft, size)
            most = algorithm_for(view.config).num_proposals(view.config)
        except DraftConfigError:
            if block_sizes:
                raise
            continue
        found += [Shape(size, n) for n in _shares(most, least=1)]
    return found


def _sizes(draft: Draft) -> list[int | None]:
    """Block sizes to try, of a draft that has blocks; else just None."""
    block = draft.config.block
    return [None] if block is None else [*_shares(block.size, least=2)]


def _shares(whole: int, least: int) -> list[int]:
    """All of it, three quarters, half and a quarter, but at least so much: the largest first."""
    return sorted({max(least, round(whole * share)) for share in (1, 0.75, 0.5, 0.25)}, reverse=True)


def tune(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    options: BenchOptions,
    engine: EngineOptions | None = None,
    *,
    stop_token_ids: Sequence[int] = (),
    block_sizes: Sequence[int] | None = None,
    progress: Progress | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Tuning:
    """Measures and chooses, for greedy decoding of `prompts` (token ids) at the first of `options.batch_size`.

    engine: its options (None: the defaults). block_sizes: those to try (None: `shapes` says). Raises `DraftsmithError`
    for no prompts, sampling options, or engine options that leave proposals out.
    """
    engine = engine or EngineOptions()
    _check(draft, prompts, options, engine)
    batch_size, tried = options.batch_size[0], shapes(draft, block_sizes)
    rows = [list(prompt) for prompt in prompts]
    sizes = list(dict.fromkeys(shape.block_size for shape in tried))
    with (progress or SilentProgress()).stage("Tune", total=2 + len(sizes) + len(tried), unit="steps") as stage:
        plain = RunningDecoder.of(target, None, engine, batch_size)
        ask = request(rows, [0] * len(rows), options, stop_token_ids)
        answers = [generation.token_ids for generation in plain.timed(ask).generations]
        stage.advance()
        texts: dict[int | None, list[Anchored]] = {}
        for size in sizes:
            view = sized(draft, size)
            texts[size] = [anchored(target, view, p, a) for p, a in zip(rows, answers, strict=True)]
            stage.advance()
        # A whole batch, also of fewer prompts: what is timed is a cycle of all its rows.
        batch = [rows[place % len(rows)] for place in range(batch_size)]
        few = request(batch, [0] * batch_size, options, stop_token_ids)
        plain_seconds = _cycle_seconds(plain, few, options.repeats)
        stage.advance()
        seconds: dict[Shape, float] = {}
        for shape in tried:
            own = engine.model_copy(update={"num_proposals": shape.num_proposals})
            decoder = RunningDecoder.of(target, DraftEntry("tuned", shape.of(draft)), own, batch_size)
            seconds[shape] = _cycle_seconds(decoder, few, options.repeats)
            stage.advance()
    ranked = candidates(texts, seconds, batch_size=batch_size)
    best, plain_speed = ranked[0].shape, batch_size / plain_seconds
    for line in told(ranked, plain_speed):
        say(line)
    return Tuning(
        method=draft.config.architecture,
        trained_block_size=block_size_of(draft),
        block_size=best.block_size,
        engine=engine.model_copy(update={"num_proposals": best.num_proposals}),
        found={
            "target": str(target.source),
            "device": str(target.device),
            "batch_size": batch_size,
            "prompts": len(rows),
            "plain_tokens_per_second": round(plain_speed, 3),
            "candidates": [candidate.to_json() for candidate in ranked],
        },
    )


def _check(draft: Draft, prompts: Sequence[object], options: BenchOptions, engine: EngineOptions) -> None:
    if not prompts:
        raise DraftsmithError("tune has no prompts; name some in `bench.prompts`")
    if options.temperature > 0:
        raise DraftsmithError(
            f"bench.temperature is {options.temperature}, and tuning replays greedy answers; set it to 0"
        )
    for name in algorithm_for(draft.config).trimming_options:
        if name in engine.proposer:
            raise DraftsmithError(
                f"engine.proposer has {name}, which leaves proposals out of verifies of fixed width and so gains no "
                "time; tuning is for whole blocks: leave it out"
            )
    if options.max_new_tokens < 2:
        raise DraftsmithError("bench.max_new_tokens is 1, and the first token belongs to no verify; raise it")


def _cycle_seconds(decoder: RunningDecoder, ask: Request, repeats: int) -> float:
    """Seconds of one cycle: the fastest of the repeats, after one run to warm up. Raises `DraftsmithError` where an
    answer holds none."""
    decoder.timed(ask)
    found = []
    for _ in range(max(repeats, 2)):
        timed = decoder.timed(ask)
        cycles = max(len(generation.accept_lengths) for generation in timed.generations)
        if cycles == 0:
            raise DraftsmithError("the answers are one token long; raise bench.max_new_tokens, or give other prompts")
        found.append((timed.seconds - timed.first_token_seconds) / cycles)
    return min(found)


def told(ranked: Sequence[Candidate], plain_speed: float) -> Iterable[str]:
    """The first five, a line each, and whether all of them are slower than plain decoding's tokens a second."""
    for place, found in enumerate(ranked[:5], start=1):
        yield (
            f"{place}. {_blocks(found.shape)}{found.shape.num_proposals} proposals: "
            f"{found.tokens_per_second:,.1f} tokens/s ({found.tokens_per_second / plain_speed:.2f} times plain), "
            f"accept length {found.accept_length:.2f}, {found.cycle_seconds * 1e3:.2f} ms a cycle"
        )
    if ranked[0].tokens_per_second < plain_speed:
        yield f"none is as fast as plain decoding ({plain_speed:,.1f} tokens/s): here the target decodes faster alone"


def _blocks(shape: Shape) -> str:
    return "" if shape.block_size is None else f"blocks of {shape.block_size}, "
