"""Which rows wait, which slot each of the others is in, and what the next passes compute. Host code: it knows numbers
of tokens and no tensor."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftsmith.base.rounding import round_up
from draftsmith.decoding.answer import Answer, Delta
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.prefill import PrefillGroup, graph_width, groups_of
from draftsmith.decoding.sampling import SamplingBounds

OVERTAKING = 64
"""Rows that may be put into slots before one that has waited longer and does not fit them. Then all wait until the
slots are empty and new ones can be made."""

_STOPS = 8
"""Stop ids that every slot has room for."""


@dataclass(frozen=True)
class PoolShape:
    """Slots, and what each has room for: rows of max_length tokens, with `stops` stop ids. reserved: cache positions of
    a slot, more than max_length, so that a step that begins at a row's last token has room."""

    slots: int
    max_length: int
    stops: int
    reserved: int

    def fits(self, answer: Answer) -> bool:
        """Whether a slot can hold the row to its end."""
        return answer.limit <= self.max_length and len(answer.stop_token_ids) <= self.stops


@dataclass(frozen=True)
class Placement:
    """Rows that go into neighbouring slots from `first` on. unclean: those of the slots whose last row was cut short,
    so that their caches may hold numbers that are not finite, which zero weights would not silence."""

    first: int
    answers: tuple[Answer, ...]
    unclean: tuple[int, ...]


@dataclass(frozen=True)
class PromptPass:
    """A pass over the next `width` tokens of the prompts in slots first .. end - 1, which touches the first `extent`
    cache positions.

    rows: for each slot the row whose prompt ends here and which gets its first token; bounds: of their sampling (None:
    there are none). graph: whether the pass is one for a graph. leaving: slots of rows that were cancelled meanwhile.
    """

    first: int
    end: int
    width: int
    extent: int
    bounds: SamplingBounds | None
    rows: tuple[Answer | None, ...]
    graph: bool
    leaving: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """A step of the first `size` slots, which touches the first `extent` cache positions; bounds: of the sampling of
    the rows in work; rows: for each slot the row that the step's report is about."""

    size: int
    extent: int
    bounds: SamplingBounds
    rows: tuple[Answer | None, ...]


class Scheduler:
    """Rows in the order in which they came; slots and who is in them.

    width, reach: tokens of a verify, and cache positions from a row's anchor on that a step touches; window: tokens of
    the target's window. on_gpu: passes take the widths and extents that suit a GPU; graphs: steps are held in graphs,
    so that their shapes must be few. occupants: the row in each slot, or None; prefilling: slots whose prompt is not
    read yet.
    """

    def __init__(
        self, options: EngineOptions, *, width: int, reach: int, window: int, on_gpu: bool, graphs: bool
    ) -> None:
        self.options = options
        self.width, self.reach, self.window = width, reach, window
        self.on_gpu, self.graphs = on_gpu, graphs
        self.waiting: deque[Answer] = deque()
        self.groups: deque[PrefillGroup] = deque()
        self.shape: PoolShape | None = None
        self.occupants: list[Answer | None] = []
        self.prefilling: set[int] = set()
        self._unclean: set[int] = set()
        self._overtaken = 0
        self._least: tuple[int | None, int, int] = None, 0, 0  # slots, max_length, stops that were asked for beforehand
        self._bounded: list[Answer] = []
        self._bounds = SamplingBounds()

    # --- rows that come and go ----------------------------------------------------------------------------------------

    def add(self, answers: Iterable[Answer]) -> None:
        """Has rows wait for slots."""
        self.waiting.extend(answers)

    def withdraw(self, answer: Answer) -> int | None:
        """Takes out a row that is not finished. Returns the slot that is free now, if one is: that of a row whose
        prompt is still being read is free when its group has been read."""
        if answer in self.waiting:
            self.waiting.remove(answer)
            return None
        slot = self.occupants.index(answer)
        self._unclean.add(slot)  # whether its numbers were finite is not read any more
        if slot in self.prefilling:
            return None
        self.occupants[slot] = None
        return slot

    def take(self, lines: Sequence[list[int]], rows: Sequence[Answer | None], *, verified: bool) -> list[Delta]:
        """Takes in a report: a line a slot, about `rows`; verified: by a step, and not by a pass over prompts."""
        deltas = []
        for line, answer in zip(lines, rows, strict=True):
            if answer is None:
                continue
            answer.arrived(most=self.width if verified else 1)
            if not answer.finished:
                deltas.append(answer.read(line, verified=verified))
        return deltas

    def leave(self, deltas: Iterable[Delta]) -> list[int]:
        """Takes rows that are finished out of their slots, which are returned."""
        ended = [delta.answer for delta in deltas if delta.last]
        slots = [self.occupants.index(answer) for answer in ended]
        for slot, answer in zip(slots, ended, strict=True):
            self.occupants[slot] = None
            if answer.fault is not None:
                self._unclean.add(slot)
        return slots

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and self.empty

    @property
    def empty(self) -> bool:
        """Whether no slot is in use."""
        return not any(self.occupants)

    # --- slots --------------------------------------------------------------------------------------------------------

    def reserve(self, slots: int, max_length: int, stops: int = 0) -> PoolShape:
        """Slots for as many rows of this length and number of stop ids. No later slots have room for less, or are of
        another number (unless `EngineOptions.slots` says one)."""
        self._least = slots, max_length, stops
        return self._wanted()

    def shape_wanted(self) -> PoolShape | None:
        """The slots that waiting rows want, where there are none, or empty ones that do not suit them."""
        shape = self.shape
        if not self.waiting or not self.empty:
            return None
        if shape is not None and shape.slots == self._wanted_slots() and all(map(shape.fits, self.waiting)):
            return None
        return self._wanted()

    def move_in(self, shape: PoolShape) -> None:
        """Has rows put into slots of this shape from now on, all of them free."""
        self.shape = shape
        self.occupants = [None] * shape.slots
        self._unclean.clear()
        self._overtaken = 0

    def admit(self) -> list[Placement]:
        """Puts waiting rows into free slots: the oldest that fit, as far as `OVERTAKING` allows."""
        free = [slot for slot, answer in enumerate(self.occupants) if answer is None]
        admitted = self._next_rows(len(free))
        placements = []
        for group in groups_of(free[: len(admitted)], admitted, self.options.prefill_rows):
            slots = range(group.first, group.first + len(group.answers))
            self.occupants[slots.start : slots.stop] = group.answers
            self.prefilling.update(slots)
            unclean = sorted(self._unclean.intersection(slots))
            self._unclean.difference_update(unclean)
            self.groups.append(group)
            placements.append(Placement(group.first, tuple(group.answers), tuple(unclean)))
        return placements

    def _next_rows(self, most: int) -> list[Answer]:
        if self.shape is None:
            return []
        admitted: list[Answer] = []
        passed_over: list[Answer] = []
        while self.waiting and len(admitted) < most and (not passed_over or self._overtaken < OVERTAKING):
            answer = self.waiting.popleft()
            if self.shape.fits(answer):
                admitted.append(answer)
                self._overtaken += bool(passed_over)
            else:
                passed_over.append(answer)
        self.waiting.extendleft(reversed(passed_over))
        if not passed_over:
            self._overtaken = 0
        return admitted

    def _wanted_slots(self) -> int:
        return self.options.slots or self._least[0] or len(self.waiting)

    def _wanted(self) -> PoolShape:
        longest = max((answer.limit for answer in self.waiting), default=0)
        length = self.options.max_length or max(self._rounded(longest), self._least[1])
        length = min(length, self.window)  # no row passes it, and a fused target's angles end a little behind it
        stops = max(_STOPS, self._least[2], *(len(answer.stop_token_ids) for answer in self.waiting))
        return PoolShape(self._wanted_slots(), length, stops, length + self.reach)

    def _rounded(self, longest: int) -> int:
        """With graphs rounded up, so that somewhat longer rows find slots, and graphs, made."""
        if not self.graphs:
            return longest
        step = self.options.context_bucket
        while longest > 8 * step:
            step *= 2
        return round_up(longest, step)

    # --- passes -------------------------------------------------------------------------------------------------------

    def passes(self) -> Iterable[PromptPass]:
        """The next passes over prompts: all there are, or one, if rows are in work meanwhile. Each is to be run before
        the next is asked for."""
        alone = not self.in_work()
        while self.groups:
            yield self._next_pass(self.groups[0])
            if not self.groups[0].answers:
                self.groups.popleft()
            if not alone:
                return

    def _next_pass(self, group: PrefillGroup) -> PromptPass:
        assert self.shape is not None
        first, answers = group.first, list(group.answers)
        width, graph = self._pass_width(self.shape, group)
        ended = group.advance(width)
        rows = tuple(a if over and not a.finished else None for a, over in zip(answers, ended, strict=True))
        starting = [row for row in rows if row is not None]
        for row in starting:
            row.launched(most=1)
        self.prefilling -= {first + place for place, over in enumerate(ended) if over}
        # The device begins with cancelled rows as well: what it does for them is taken back before any step.
        leaving = tuple(first + place for place, over in enumerate(ended) if over and answers[place].finished)
        for slot in leaving:
            self.occupants[slot] = None
        # A kernel reads what a query sees, however long the view; a mask costs what the view is long.
        extent = self.shape.reserved if self.on_gpu else group.begin
        bounds = SamplingBounds.of(row.sampling for row in starting) if starting else None
        return PromptPass(first, first + len(answers), width, extent, bounds, rows, graph, leaving)

    def _pass_width(self, shape: PoolShape, group: PrefillGroup) -> tuple[int, bool]:
        """Tokens of the group's next pass, and whether that is one for a graph. On a GPU such passes have the same few
        widths with and without graphs, so that both give the same to the last bit; a CPU would compute the padding."""
        chunk = self.options.prefill_chunk
        width = group.next_width(chunk)
        if not self.on_gpu:
            return width, False
        # Padding needs ids and cache entries too.
        left = min(shape.reserved, shape.max_length + self.width, self.window) - group.begin
        padded = graph_width(width, len(group.answers), min(chunk, left))
        return (width, False) if padded is None else (padded, True)

    def in_work(self) -> list[Answer]:
        """Rows whose prompt is read, and which may not have ended, as far as the host knows."""
        return [
            answer
            for slot, answer in enumerate(self.occupants)
            if answer is not None and slot not in self.prefilling and not answer.surely_ended
        ]

    def next_step(self) -> StepPlan | None:
        """The next step, if any row may need one."""
        in_work = self.in_work()
        if not in_work:
            return None
        if in_work != self._bounded:  # the same rows have the same bounds
            self._bounded, self._bounds = in_work, SamplingBounds.of(answer.sampling for answer in in_work)
        size = self._batch_bucket()
        extent = self._extent(size)
        rows = tuple(None if slot in self.prefilling else answer for slot, answer in enumerate(self.occupants[:size]))
        for answer in rows:
            if answer is not None:
                answer.launched(most=self.width)
        return StepPlan(size, extent, self._bounds, rows)

    def step_shapes(self) -> list[tuple[int, int]]:
        """(size, extent) of every step that there may be with graphs, in the present slots."""
        assert self.shape is not None
        sizes = sorted({*(n for n in self.options.batch_buckets or () if n <= self.shape.slots), self.shape.slots})
        extents, extent = [], self.options.context_bucket
        while extent < self.shape.reserved:
            extents.append(extent)
            extent *= 2
        shortest = 1 + self.reach  # of a row of two tokens
        return [(size, e) for size in sizes for e in (*extents, self.shape.reserved) if e >= shortest]

    def _batch_bucket(self) -> int:
        """How many slots a step computes."""
        used = max(slot for slot, answer in enumerate(self.occupants) if answer is not None) + 1
        whole = len(self.occupants)
        return min((size for size in self.options.batch_buckets or () if used <= size <= whole), default=whole)

    def _extent(self, size: int) -> int:
        """How many cache positions a step may touch: a bucket that holds all rows, however far they may be by now."""
        assert self.shape is not None
        longest = max((answer.most_length for answer in self.occupants[:size] if answer is not None), default=1)
        needed = longest - 1 + self.reach
        extent = bucket = self.options.context_bucket
        if self.graphs:
            while extent < needed:
                extent *= 2
        else:
            extent = round_up(needed, bucket)
        return min(extent, self.shape.reserved)
