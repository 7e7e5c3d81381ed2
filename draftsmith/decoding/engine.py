"""The decoding engine: requests come in, rows are put into slots, prompts are read, and steps are launched.

The device holds all that decoding needs (`runner`), and a step (`step`) is a function of it. The host decides which
rows are where (`scheduler`), launches, and reads what came of it: on a GPU one step behind, so that the device never
waits for it. That lag changes no result, because stop tokens and limits are handled on the device, and what is computed
for a row that has ended is not committed.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from draftsmith.algorithms.drafter import AnyDrafter
from draftsmith.base.devices import current
from draftsmith.decoding.answer import Answer, Delta, raise_fault
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.runner import Runner
from draftsmith.decoding.sampling import SamplingBounds, SamplingOptions
from draftsmith.decoding.scheduler import PoolShape, Scheduler
from draftsmith.decoding.step import Stepper
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.device import need_triton
from draftsmith.targets.target import Target


class Engine:
    """Decodes with a target and, perhaps, a draft.

    `decode` runs a request to its end. `submit` takes a request in and `step` works on all that were taken in: rows
    that end make room for rows that wait. Not safe for use by several threads at once. Raises `DraftsmithError` at
    construction when draft and target do not fit, the target cannot be decoded, an option does not apply, or a CUDA
    device has no Triton beside it.
    """

    def __init__(self, target: Target, draft: Draft | None = None, options: EngineOptions | None = None) -> None:
        self.target, self.draft = target, draft
        self.options = options = options or EngineOptions()
        on_gpu = target.device.type == "cuda"
        if on_gpu:  # the target's choice of tokens, at least, is made by kernels there
            need_triton(f"decoding on {target.device}")
        if options.graphs == "on" and not on_gpu:
            raise DraftsmithError(f"graphs is on, but the target is on {target.device}; set it to auto or off")
        target.check_decoding()
        graphs = on_gpu and options.graphs != "off"
        self._lag = int(on_gpu) if options.steps_ahead is None else options.steps_ahead
        with current(target.device):
            stepper = Stepper.of(target, draft, options)
        self.runner = Runner(stepper, graphs=graphs, max_graphs=options.max_graphs)
        window = target.max_position_embeddings
        self.scheduler = Scheduler(
            options, width=stepper.width, reach=stepper.reach, window=window, on_gpu=on_gpu, graphs=graphs
        )

    def decode(self, request: Request) -> list[Generation]:
        """Runs a request: one `Generation` a prompt, in order.

        Raises `DraftsmithError` as `submit`, and when a row met numbers that are not finite.
        """
        answers = self.submit(request)
        while not all(answer.finished for answer in answers):
            self.step()
            if any(answer.fault is not None for answer in answers):
                for answer in answers:
                    self.cancel(answer)
                raise_fault(answers)
        return [answer.generation() for answer in answers]

    def submit(self, request: Request) -> tuple[Answer, ...]:
        """Takes a request in: an `Answer` a prompt, in order, which grows with the steps to come.

        Raises `DraftsmithError` for prompts that the models, or the slots, cannot take.
        """
        window = self.target.max_position_embeddings
        draft_positions = None if self.draft is None else self.draft.config.max_position_embeddings
        request.check(self.target.vocab_size, window, draft_positions, self.options.max_length)
        answers = tuple(Answer(request, index, window) for index in range(len(request.prompts)))
        self.scheduler.add(answers)
        return answers

    def step(self) -> list[Delta]:
        """Takes waiting rows into free slots, reads prompts (one pass, if rows are in work meanwhile), decodes one step
        of all rows in work, and reads what earlier steps did: what was added to which answers, in that order."""
        with current(self.target.device):
            if (shape := self.scheduler.shape_wanted()) is not None:
                self._move_into(shape)
            for placement in self.scheduler.admit():
                self.runner.place(placement)
            for prompts in self.scheduler.passes():
                self.runner.prefill(prompts)
            plan = self.scheduler.next_step()
            if plan is not None:
                self.runner.step(plan)
            return self._read(0 if plan is None else self._lag)

    async def stream(self, answer: Answer) -> AsyncIterator[int]:
        """An answer's tokens one by one; steps the engine when there are none to give. Raises `DraftsmithError` when
        the row meets numbers that are not finite."""
        given = 0
        while given < len(answer.token_ids) or not answer.finished:
            if given == len(answer.token_ids):
                self.step()
                await asyncio.sleep(0)  # lets the readers of other answers have theirs
            for token in answer.token_ids[given:]:
                given += 1
                yield token
        raise_fault([answer])

    def cancel(self, answer: Answer) -> None:
        """Ends an answer as it is; nothing happens to one that is finished. No step reports it any more."""
        if answer.finished:
            return
        answer.finish_reason = "cancelled"
        slot = self.scheduler.withdraw(answer)
        if slot is not None:
            self.runner.release([slot])

    def prepare(
        self,
        *,
        slots: int,
        max_length: int,
        stops: int = 0,
        samplings: Sequence[SamplingOptions] = (SamplingOptions(),),
    ) -> None:
        """Makes slots before there are rows, for as many rows of up to max_length tokens and `stops` stop ids, and
        keeps them while no row needs more. With graphs, every step of rows that all choose their tokens in one of the
        ways of `samplings` is captured. Raises `DraftsmithError` while there is work, and where `EngineOptions.slots`
        says another number."""
        if not self.scheduler.idle:
            raise DraftsmithError("slots are prepared while rows are waiting or in work; do it before, or when idle")
        if self.options.slots not in (None, slots):
            raise DraftsmithError(f"{slots} slots are to be prepared, and the option slots is {self.options.slots}")
        with current(self.target.device):
            self._move_into(self.scheduler.reserve(slots, max_length, stops))
            self.runner.warm(self.scheduler.step_shapes(), [SamplingBounds.of([one]) for one in samplings])

    @property
    def drafter(self) -> AnyDrafter | None:
        """What proposes: of the draft's method, unless another one is put in its place (before anything is decoded,
        else `DraftsmithError`). None without a draft."""
        return self.runner.stepper.drafter

    @drafter.setter
    def drafter(self, drafter: AnyDrafter) -> None:
        if self.drafter is None or self.runner.pool is not None:
            raise DraftsmithError("a drafter can be put in only with a draft, and before anything is decoded")
        self.runner.stepper.drafter = drafter
        self.scheduler.width, self.scheduler.reach = drafter.width, drafter.reach

    @property
    def width(self) -> int:
        """Tokens in one verify."""
        return self.runner.stepper.width

    @property
    def preparations(self) -> tuple[int, int]:
        """How often slots were made, and steps and passes prepared for graphs with the present ones: where it changed,
        a run took time for preparations."""
        return self.runner.preparations

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.idle

    def _move_into(self, shape: PoolShape) -> None:
        self._read(0)  # what is left is about rows that were cancelled
        self.runner.make(shape)
        self.scheduler.move_in(shape)

    def _read(self, leave: int) -> list[Delta]:
        """Takes in all reports but the last `leave`, and frees the slots of rows that ended."""
        deltas: list[Delta] = []
        while len(self.runner.reports) > leave:
            lines, report = self.runner.reports.pop()
            deltas += self.scheduler.take(lines, report.rows, verified=report.verified)
        if deltas:
            self.runner.release(self.scheduler.leave(deltas))
        return deltas
