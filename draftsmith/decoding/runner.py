"""The device's side of decoding: the models, the memory of the slots, graphs of passes, and reports on their way."""

from collections.abc import Iterable, Sequence

import torch

from draftsmith.decoding.graphs import StepGraphs
from draftsmith.decoding.pool import SlotPool
from draftsmith.decoding.reports import Reports
from draftsmith.decoding.sampling import SamplingBounds
from draftsmith.decoding.scheduler import Placement, PoolShape, PromptPass, StepPlan
from draftsmith.decoding.step import Stepper
from draftsmith.kernels.state.decoding_state import DecodingState


class Runner:
    """Runs what the scheduler planned. graphs: replay steps, and small passes over prompts, from CUDA graphs, of which
    max_graphs of each kind are kept.

    stepper: the models; pool: the slots' memory, None before they are made; reports: what was launched and is not
    read yet.
    """

    def __init__(self, stepper: Stepper, *, graphs: bool, max_graphs: int) -> None:
        self.stepper = stepper
        self.graphs = graphs
        self.reports = Reports()
        self.pool: SlotPool | None = None
        self.step_graphs: StepGraphs | None = None
        self.prompt_graphs: StepGraphs | None = None
        self._max_graphs = max_graphs
        self._pools = 0

    @property
    def preparations(self) -> tuple[int, int]:
        """How often slots were made, and passes prepared for graphs with the present ones."""
        graphs = (self.step_graphs, self.prompt_graphs)
        return self._pools, sum(each.prepared for each in graphs if each is not None)

    def make(self, shape: PoolShape) -> None:
        """The slots' memory; the former one, and the graphs that work on it, go."""
        device = self.stepper.target.device
        self.pool = None
        self._pools += 1
        if self.graphs:
            torch.cuda.synchronize(device)  # a graph may still be running
            self.step_graphs = StepGraphs(device, self._max_graphs)
            self.prompt_graphs = StepGraphs(device, self._max_graphs, beside=self.step_graphs)
        stepper = self.stepper
        self.pool = SlotPool(
            DecodingState.empty(shape.slots, shape.max_length, stepper.width, shape.stops, device),
            stepper.target.new_cache(shape.slots, shape.reserved, stepper.width),
            None if stepper.drafter is None else stepper.drafter.new_state(shape.slots, shape.reserved),
        )

    def warm(self, shapes: Iterable[tuple[int, int]], every_bounds: Sequence[SamplingBounds]) -> None:
        """Captures steps of these (size, extent) for graphs, as far as there is room for them; no slot may have a row,
        so that a step changes nothing that counts."""
        keys = [(size, extent, bounds) for bounds in every_bounds for size, extent in shapes]
        if self.step_graphs is not None:
            for size, extent, bounds in keys[: self._max_graphs]:
                for _ in range(2):  # a graph is captured at the second
                    self._run_step(size, extent, bounds)

    def place(self, placement: Placement) -> None:
        """Puts rows into slots."""
        self._slots.place(placement.first, placement.answers, placement.unclean)

    def release(self, slots: Sequence[int]) -> None:
        """Takes rows out of slots."""
        self._slots.release(slots)

    def prefill(self, plan: PromptPass) -> None:
        """Launches a pass over prompts."""
        pool, stepper = self._slots, self.stepper

        def read() -> None:
            stepper.prefill(pool.rows(plan.first, plan.end), plan.width, plan.extent, plan.bounds)

        if plan.graph and self.prompt_graphs is not None:
            self.prompt_graphs.run((plan.first, plan.end, plan.width, plan.bounds), read)
        else:
            read()
        if plan.bounds is not None:
            self.reports.push(pool.state.report[plan.first : plan.end], plan.rows, verified=False)
        pool.release(plan.leaving)

    def step(self, plan: StepPlan) -> None:
        """Launches a step."""
        self._run_step(plan.size, plan.extent, plan.bounds)
        self.reports.push(self._slots.rows(0, plan.size).state.report, plan.rows, verified=True)

    def _run_step(self, size: int, extent: int, bounds: SamplingBounds) -> None:
        slots, stepper = self._slots.rows(0, size), self.stepper

        def run() -> None:
            stepper.step(slots, extent, bounds)

        if self.step_graphs is None:
            run()
        else:
            self.step_graphs.run((size, extent, bounds), run)

    @property
    def _slots(self) -> SlotPool:
        assert self.pool is not None  # made before anything is planned
        return self.pool
