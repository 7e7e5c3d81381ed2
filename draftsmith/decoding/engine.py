"""The decoding engine: requests come in, rows are put into slots, prompts are read, and steps are launched.

The device holds all that decoding needs (`pool`), and a step (`step`) is a function of it. The host decides which rows
are where, launches, and reads what came of it: on a GPU one step behind, so that the device never waits for it. That
lag changes no result, because stop tokens and limits are seen to on the device, and what is computed for a row that
has ended is not committed.
"""

from collections import deque
from collections.abc import Sequence

import torch

from draftsmith.algorithms.drafter import AnyDrafter
from draftsmith.algorithms.registry import algorithm_for
from draftsmith.base.devices import current
from draftsmith.base.rounding import round_up
from draftsmith.decoding.answer import Answer, Fault, not_finite
from draftsmith.decoding.graphs import StepGraphs
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.pool import SlotPool
from draftsmith.decoding.prefill import PrefillGroup, graph_width, groups_of
from draftsmith.decoding.reports import Reports
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingBounds
from draftsmith.decoding.step import Stepper
from draftsmith.drafts.config import check_against_target
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.device import need_triton
from draftsmith.kernels.state.decoding_state import DecodingState
from draftsmith.targets.target import Target


class Engine:
    """Decodes with a target and, perhaps, a draft.

    `decode` runs a request to its end. `submit` takes a request in and `step` works on all that were taken in: rows
    that end make room for rows that wait. Not safe for use by several threads at once. Raises `DraftsmithError` at
    construction when draft and target do not fit, an option does not apply, or a CUDA device has no Triton beside it.
    """

    def __init__(self, target: Target, draft: Draft | None = None, options: EngineOptions | None = None) -> None:
        self.target = target
        self.draft = draft
        self.options = options or EngineOptions()
        on_gpu = target.device.type == "cuda"
        if on_gpu:  # the target's choice of tokens, at least, is made by kernels there
            need_triton(f"decoding on {target.device}")
        with current(target.device):
            self.stepper = self._stepper()
        if self.options.graphs == "on" and not on_gpu:
            raise DraftsmithError(f"graphs is on, but the target is on {target.device}; set it to auto or off")
        self._on_gpu = on_gpu
        self._graphs_on = on_gpu and self.options.graphs != "off"
        self._lag = int(on_gpu) if self.options.steps_ahead is None else self.options.steps_ahead
        self._waiting: deque[Answer] = deque()
        self._groups: deque[PrefillGroup] = deque()
        self._reports = Reports()
        self._graphs: StepGraphs | None = None
        self._prompt_graphs: StepGraphs | None = None
        self.pool: SlotPool | None = None
        self._pools = 0

    # --- what callers do ----------------------------------------------------------------------------------------------

    def decode(self, request: Request) -> list[Generation]:
        """Runs a request: one `Generation` a prompt, in order.

        Raises `DraftsmithError` as `submit`, and when a row met numbers that are not finite.
        """
        answers = self.submit(request)
        while not all(answer.finished for answer in answers):
            self.step()
            faults = {answer.index: answer.fault for answer in answers if answer.fault is not None}
            if faults:
                for answer in answers:
                    self.cancel(answer)
                part = Fault.TARGET if Fault.TARGET in faults.values() else Fault.DRAFT
                raise not_finite(part, [i for i, fault in faults.items() if fault == part], self.target.dtype)
        return [answer.generation() for answer in answers]

    def submit(self, request: Request) -> tuple[Answer, ...]:
        """Takes a request in: an `Answer` a prompt, in order, which grows with the steps to come.

        Raises `DraftsmithError` for prompts that the models, or the slots, cannot take.
        """
        window = self.target.max_position_embeddings
        draft_positions = None if self.draft is None else self.draft.config.max_position_embeddings
        request.check(vocab_size=self.target.vocab_size, window=window, draft_positions=draft_positions)
        answers = tuple(
            Answer(request, index, window, self.step, self.target.dtype) for index in range(len(request.prompts))
        )
        most = self.options.max_length
        for answer in answers:
            if most is not None and answer.limit > most:
                raise DraftsmithError(
                    f"prompt {answer.index} has {len(answer.prompt)} tokens and may become {answer.limit} long, but a "
                    f"slot has room for {most} (max_length); shorten it, lower max_new_tokens or raise max_length"
                )
        self._waiting.extend(answers)
        return answers

    def cancel(self, answer: Answer) -> None:
        """Ends an answer as it is; nothing happens to one that is finished."""
        if answer.finished:
            return
        answer.finish_reason = "cancelled"
        if answer in self._waiting:
            self._waiting.remove(answer)
        elif self.pool is not None:
            slot = self.pool.occupants.index(answer)
            self.pool.unclean.add(slot)  # whether its numbers were finite is not read any more
            if slot not in self.pool.prefilling:  # else its slot is free when its group has been read
                self.pool.release([slot])

    @property
    def drafter(self) -> AnyDrafter | None:
        """What proposes: of the draft's method, unless another one is put in its place (before anything is decoded,
        else `DraftsmithError`). None without a draft."""
        return self.stepper.drafter

    @drafter.setter
    def drafter(self, drafter: AnyDrafter) -> None:
        if self.stepper.drafter is None or self.pool is not None:
            raise DraftsmithError("a drafter can be put in only with a draft, and before anything is decoded")
        self.stepper.drafter = drafter

    @property
    def width(self) -> int:
        """Tokens in one verify."""
        return self.stepper.width

    @property
    def preparations(self) -> tuple[int, int]:
        """How often slots were made, and steps and passes prepared for graphs with the present ones: where it changed,
        a run took time for preparations."""
        return self._pools, sum(graphs.prepared for graphs in (self._graphs, self._prompt_graphs) if graphs is not None)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and (self.pool is None or self.pool.idle)

    def step(self) -> None:
        """Takes waiting rows into free slots, reads prompts (one pass, if rows are in work meanwhile), decodes one
        step of all rows in work, and reads what earlier steps did."""
        with current(self.target.device):
            self._admit()
            if self.pool is None:
                return
            self._prefill(self.pool)
            launched = self._launch(self.pool)
            self._read(self.pool, self._lag if launched else 0)

    # --- rows and slots -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        if not self._waiting:
            return
        if self.pool is None or (self.pool.idle and not self._suits(self.pool)):
            self._read_all()
            self.pool = self._new_pool()
        free = self.pool.free_slots()
        admitted: list[Answer] = []
        while self._waiting and len(admitted) < len(free) and self._fits(self.pool, self._waiting[0]):
            admitted.append(self._waiting.popleft())
        for group in groups_of(free[: len(admitted)], admitted, self.options.prefill_rows):
            self.pool.place(group.first, group.answers)
            self._groups.append(group)

    def _wanted_slots(self) -> int:
        return self.options.slots or len(self._waiting)

    def _wanted_length(self) -> int:
        """Room for the longest row that waits; with graphs rounded up, so that somewhat longer ones find them made."""
        longest = max(answer.limit for answer in self._waiting)
        if not self._graphs_on:
            return longest
        step = self.options.context_bucket
        while longest > 8 * step:
            step *= 2
        return round_up(longest, step)

    def _suits(self, pool: SlotPool) -> bool:
        """Whether an idle pool is the one that the waiting rows want."""
        return pool.size == self._wanted_slots() and all(self._fits(pool, answer) for answer in self._waiting)

    @staticmethod
    def _fits(pool: SlotPool, answer: Answer) -> bool:
        return answer.limit <= pool.max_length and len(answer.stop_token_ids) <= pool.state.stop_ids.shape[1]

    def _new_pool(self) -> SlotPool:
        """Slots for the rows that wait; the former pool, and the graphs of its memory, go."""
        self.pool = None
        self._pools += 1
        if self._graphs_on:
            torch.cuda.synchronize(self.target.device)  # a graph may still be running
            self._graphs = StepGraphs(self.target.device, self.options.max_graphs)
            self._prompt_graphs = StepGraphs(self.target.device, self.options.max_graphs, beside=self._graphs)
        slots, stepper = self._wanted_slots(), self.stepper
        # No row passes the window, and a fused target's angles end a little behind it.
        max_length = min(self.options.max_length or self._wanted_length(), self.target.max_position_embeddings)
        stops = max(8, *(len(answer.stop_token_ids) for answer in self._waiting))
        reserved = max_length + stepper.reach
        return SlotPool(
            DecodingState.empty(slots, max_length, stepper.width, stops, self.target.device),
            self.target.new_cache(slots, reserved, stepper.width),
            None if stepper.drafter is None else stepper.drafter.new_state(slots, reserved),
            max_length,
            reserved,
        )

    # --- launching ----------------------------------------------------------------------------------------------------

    def _prefill(self, pool: SlotPool) -> None:
        alone = not self._in_work(pool)
        while self._groups:
            self._prefill_pass(pool, self._groups[0])
            if not self._groups[0].answers:
                self._groups.popleft()
            if not alone:
                return

    def _prefill_pass(self, pool: SlotPool, group: PrefillGroup) -> None:
        answers, first = group.answers, group.first
        end = first + len(answers)
        width, small = self._pass_width(pool, group)
        ended = group.advance(width)
        rows = tuple(a if over and not a.finished else None for a, over in zip(answers, ended, strict=True))
        starting = [row for row in rows if row is not None]
        bounds = SamplingBounds.of(row.sampling for row in starting) if starting else None
        # A kernel reads what a query sees, however long the view; a mask costs what the view is long.
        extent = pool.reserved if self._on_gpu else group.begin

        def read() -> None:
            self.stepper.prefill(pool.rows(first, end), width, extent, bounds)

        if small and self._prompt_graphs is not None:
            self._prompt_graphs.run((first, end, width, bounds), read)
        else:
            read()
        pool.prefilling -= {first + row for row, over in enumerate(ended) if over}
        for row in starting:
            row.launched(most=1)
        if starting:
            self._reports.push(pool.state.report[first:end], first, rows, verified=False)
        # The device began with these as well: what it did for them is taken back before any step.
        pool.release([first + i for i, answer in enumerate(answers) if ended[i] and answer.finished])

    def _pass_width(self, pool: SlotPool, group: PrefillGroup) -> tuple[int, bool]:
        """Tokens of the group's next pass, and whether that is one for a graph. On a GPU such passes have the same few
        widths with and without graphs, so that both give the same to the last bit; a CPU would compute the padding."""
        chunk = self.options.prefill_chunk
        width = group.next_width(chunk)
        if not self._on_gpu:
            return width, False
        room = min(pool.readable, self.target.max_position_embeddings) - group.begin
        padded = graph_width(width, len(group.answers), min(chunk, room))
        return (width, False) if padded is None else (padded, True)

    def _in_work(self, pool: SlotPool) -> list[Answer]:
        """Rows whose prompt is read, and which may not have ended, as far as the host knows."""
        return [
            answer
            for slot, answer in enumerate(pool.occupants)
            if answer is not None and slot not in pool.prefilling and not answer.surely_ended
        ]

    def _launch(self, pool: SlotPool) -> bool:
        """Launches a step, if any row may need one."""
        in_work = self._in_work(pool)
        if not in_work:
            return False
        size = self._batch_bucket(pool)
        extent = self._extent(pool, size)
        bounds = SamplingBounds.of(answer.sampling for answer in in_work)
        slots = pool.rows(0, size)

        def step() -> None:
            self.stepper.step(slots, extent, bounds)

        if self._graphs is None:
            step()
        else:
            self._graphs.run((size, extent, bounds), step)
        rows = tuple(None if slot in pool.prefilling else answer for slot, answer in enumerate(pool.occupants[:size]))
        for answer in rows:
            if answer is not None:
                answer.launched(most=self.stepper.width)
        self._reports.push(slots.state.report, 0, rows, verified=True)
        return True

    def _batch_bucket(self, pool: SlotPool) -> int:
        """How many slots a step computes."""
        used = max(slot for slot, answer in enumerate(pool.occupants) if answer is not None) + 1
        buckets = self.options.batch_buckets or ()
        return min((bucket for bucket in buckets if used <= bucket <= pool.size), default=pool.size)

    def _extent(self, pool: SlotPool, size: int) -> int:
        """How many cache positions a step may touch: a bucket that holds all rows, however far they may be by now."""
        longest = max((answer.most_length for answer in pool.occupants[:size] if answer is not None), default=1)
        needed = longest - 1 + self.stepper.reach
        extent = bucket = self.options.context_bucket
        if self._graphs_on:
            while extent < needed:
                extent *= 2
        else:
            extent = round_up(needed, bucket)
        return min(extent, pool.reserved)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, pool: SlotPool, leave: int) -> None:
        """Takes in all reports but the last `leave`, and frees the slots of rows that ended."""
        ended: list[int] = []
        while len(self._reports) > leave:
            lines, report = self._reports.pop()
            for slot, (line, answer) in enumerate(zip(lines, report.rows, strict=True), report.first):
                if answer is None:
                    continue
                answer.arrived(most=self.stepper.width if report.verified else 1)
                if answer.finished:
                    continue
                answer.read(line, verified=report.verified)
                if answer.finished:
                    ended.append(slot)
                    if answer.fault is not None:
                        pool.unclean.add(slot)
        pool.release(ended)

    def _read_all(self) -> None:
        if self.pool is not None:
            self._read(self.pool, 0)

    # --- construction -------------------------------------------------------------------------------------------------

    def _stepper(self) -> Stepper:
        draft, options = self.draft, self.options
        if draft is None:
            self._refuse_draft_options()
            return Stepper(self.target, None, options.verify_width or 1)
        self._check(draft)
        method = algorithm_for(draft.config)
        decoding = method.parse_decoding(options.proposer, options.num_proposals)
        return Stepper(self.target, method.drafter(draft, self.target.ends, decoding))

    def _check(self, draft: Draft) -> None:
        check_against_target(draft.config, self.target.info)
        if self.options.verify_width is not None:
            raise DraftsmithError(
                f"verify_width is {self.options.verify_width}, but with a draft the width follows from the proposals; "
                "leave it out, or set num_proposals"
            )
        if draft.device != self.target.device:
            raise DraftsmithError(
                f"the draft is on {draft.device} and the target on {self.target.device}; load both on one device"
            )

    def _refuse_draft_options(self) -> None:
        unused: Sequence[tuple[str, object]] = (
            ("num_proposals", self.options.num_proposals),
            ("proposer", self.options.proposer or None),
        )
        for name, value in unused:
            if value is not None:
                raise DraftsmithError(f"{name} is {value!r}, but there is no draft to propose; leave it out")
