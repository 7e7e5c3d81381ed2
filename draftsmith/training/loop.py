"""The training loop. It knows steps, sums and schedules, and no method."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from draftsmith.base.progress import Stage
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.parallel.processes import raise_together
from draftsmith.training.checkpoint import Checkpoint, Position, RunCheckpoints
from draftsmith.training.clock import Clock
from draftsmith.training.evaluation import Evaluation, score
from draftsmith.training.flops import peak_flops
from draftsmith.training.forward import DraftLoss, share_done
from draftsmith.training.graphs import StepGraphs
from draftsmith.training.guards import (
    MicroBatchRecord,
    NonFiniteError,
    StepRecord,
    Verdicts,
    find_non_finite,
    write_report,
)
from draftsmith.training.interruption import StopRequest
from draftsmith.training.loading import Step, TrainingBatches
from draftsmith.training.micro_batch import MicroBatch
from draftsmith.training.options import TrainOptions
from draftsmith.training.parallel import Parallel, whole
from draftsmith.training.plan import StepPlan
from draftsmith.training.schedule import learning_rate
from draftsmith.training.sums import Averages, Sums
from draftsmith.training.tracking import RunLog, memory_bytes
from draftsmith.training.update import Updater

_log = logging.getLogger(__name__)

EvaluateGenerate = Callable[[Draft], dict[str, float]]
"""A real-generation evaluation: gets the draft in its export dtype, returns named numbers."""

# Sums that steer the step rather than describe it; they travel with the metrics in the step's one reduction.
_STEERING = _GRADIENT, _STOP = "_gradient", "_stop"


class Loop:
    """Trains from wherever it stands until `total_steps` or a request to stop.

    An optimiser step: every process forwards its micro-batches and adds up gradients of the objective's numerators; all
    sums are reduced over the processes; the gradient is divided once, by the global denominator; it is clipped and
    applied. Between two log entries the host waits for the device only where `Verdicts` does.
    """

    def __init__(
        self,
        draft_loss: DraftLoss,
        *,
        plan: StepPlan,
        batches: TrainingBatches,
        evaluation: Evaluation | None,
        evaluate_generate: EvaluateGenerate | None,
        options: TrainOptions,
        total_steps: int,
        accelerator: Accelerator,
        device: torch.device,
        checkpoints: RunCheckpoints,
        log: RunLog,
        lag: int,
    ) -> None:
        self.draft_loss = draft_loss
        self.parallel = Parallel(draft_loss, options.parallel, accelerator)
        self.updater = Updater(draft_loss, self.parallel, options)
        self.graphs = StepGraphs(self.parallel.forward, list(draft_loss.parameters())) if options.graphs else None
        self.plan, self.batches = plan, batches
        self.evaluation, self.evaluate_generate = evaluation, evaluate_generate
        self.options, self.total_steps = options, total_steps
        self.accelerator, self.device = accelerator, device
        self.checkpoints, self.log = checkpoints, log
        self.position = Position(step=0, epoch=0, step_in_epoch=0)
        self.best_score: float | None = None
        self.verdicts = Verdicts(device, lag)
        self.stopping = False
        self.skipped = 0
        self.window = Sums()  # metrics since the last log entry, over all processes
        self.clock = Clock()
        self.peak = peak_flops(device, log.options.peak_tflops)
        self.shown: dict[str, str] = {}  # beside the progress bar

    # --- state ------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint) -> None:
        """Stand exactly where `checkpoint` was saved."""
        checkpoint.read_into(self.draft_loss.draft.state_dict(), self.updater.tensors())
        state = checkpoint.state()
        self.window = Sums.from_state(state["window"], self.device)
        self.skipped = state["skipped"]
        self.position = checkpoint.position
        best = self.checkpoints.best()
        self.best_score = best.position.score if best is not None else None
        if self.accelerator.process_index < len(state["generators"]):
            _set_generators(state["generators"][self.accelerator.process_index], self.device)

    def save(self) -> None:
        """Write a checkpoint of this moment, and drop the ones that are not to be kept."""
        self._judge(all_of_them=True)
        with self.clock.stopped():
            state = {
                "window": self.window.state_dict(),
                "skipped": self.skipped,
                "generators": gather_object([_generators(self.device)]),
            }
            weights, optimizer = self.draft_loss.draft.state_dict(), self.updater.tensors()
            if self.parallel.sharded:
                self.checkpoints.save_sharded(self.position, weights, optimizer, state, self.accelerator)
            else:
                failure = None
                if self.accelerator.is_main_process:
                    try:
                        self.checkpoints.save(self.position, weights, {**state, "optimizer": optimizer})
                    except DraftsmithError as error:
                        failure = error
                raise_together(failure)
            if self.accelerator.is_main_process:
                self.checkpoints.prune(self.options.keep_last, self.options.keep_best)
            self.accelerator.wait_for_everyone()

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, stage: Stage) -> str | None:
        """Train to the end; returns None, or the signal that stopped the run early. The last state is saved either
        way."""
        # A request to stop has precedence over an evaluation, which is then still to be made.
        due = self.position.step == 0 or _due(self.position.step, self.options.eval_every)
        if due and self.position.evaluation is None and self.evaluate():
            self.save()
        with StopRequest() as request:
            self.clock = Clock()
            start = self.position
            for step in self.batches.steps(start.epoch, start.step_in_epoch, self.total_steps - start.step):
                self._step(step, request, stage)
                stopped = self.stopping
                done = self.position.step
                last = done == self.total_steps
                improved = (last or _due(done, self.options.eval_every)) and not stopped and self.evaluate()
                if last or stopped or improved or _due(done, self.options.save_every):
                    self.save()
                if stopped and not last:
                    return request.signal_name or "a signal to another process"
        return None

    def _step(self, step: Step, request: StopRequest, stage: Stage) -> None:
        """One optimiser step; `self.stopping` says, as far as is known, whether any process was asked to stop."""
        done = self.position.step
        self.updater.clear()
        sums, forwards = Sums(), []
        # Filled on the device: a tensor made of a Python number would be copied there, and the copy waited for.
        asked = torch.full((), float(request.signal_name is not None), device=self.device)
        progress = share_done(done, self.total_steps, self.device)
        for number in range(step.num_forwards):
            batch = self._next(step)
            with self.parallel.accumulating(last=number + 1 == step.num_forwards):
                if self.graphs is not None:
                    numerator, denominator, metrics = self.graphs.run(batch, progress)
                else:
                    numerator, denominator, metrics = self.parallel.forward(batch, progress)
                    numerator.backward()
            sums = sums.plus(Sums.of({_GRADIENT: (numerator, denominator), _STOP: (asked, asked), **metrics}))
            self.clock.add(batch.work)
            # A copy: the next replay of a graph writes where this one wrote.
            forwards.append(MicroBatchRecord(batch.packed.sample_ids, numerator.detach().clone()))
        sums = sums.over_ranks(self.accelerator)

        self._judge()
        rate = learning_rate(done, self.total_steps, self.options)
        update = self.updater.apply(*sums[_GRADIENT], rate)
        self.verdicts.add(StepRecord(done, rate, update, sums[_STOP][0], forwards))

        # A step that is left out leaves the averages alone as well.
        self.window = self.window.plus(sums.where(update.finite))
        following = self.plan.following(step.epoch, step.step_in_epoch)
        self.position = Position(step=done + 1, epoch=following[0], step_in_epoch=following[1])
        self._judge()
        if _due(done + 1, self.log.options.every) or done + 1 == self.total_steps:
            self._log_window(rate, update.norm, step.epoch)
        stage.advance(1, **self.shown)

    def _judge(self, *, all_of_them: bool = False) -> None:
        """Look at the steps whose outcome is due: stop at one that was not finite, or count it."""
        for verdict in self.verdicts.take(all_of_them=all_of_them):
            self.stopping = self.stopping or verdict.stopping
            if verdict.finite:
                continue
            rank = self.accelerator.process_index
            report = find_non_finite(self.draft_loss, self.updater.names, verdict.record, rank)
            path = write_report(report, self.checkpoints.directory.parent / "debug")
            if not self.options.skip_nonfinite:
                raise NonFiniteError(
                    f"{report}. Debug record: {path}. Lower train.lr, look at these documents, resume from the last "
                    "checkpoint, or leave such steps out with train.skip_nonfinite"
                )
            self.skipped += 1
            _log.warning("%s; left out (debug record: %s)", report, path)

    def _next(self, step: Step) -> MicroBatch:
        started = time.perf_counter()
        batch = next(step.micro_batches)
        self.clock.waited += time.perf_counter() - started
        return batch

    # --- numbers ----------------------------------------------------------------------------------------------------

    def evaluate(self) -> bool:
        """Evaluate on the held-out documents; returns whether that is the best so far (and worth a checkpoint)."""
        if self.evaluation is None:
            return False
        self._judge(all_of_them=True)
        with self.clock.stopped():
            progress = share_done(min(self.position.step, self.total_steps - 1), self.total_steps, self.device)
            averages = self.evaluation.run(self.draft_loss, self.device, progress, self.accelerator)
            self.parallel.after_forward_only()
            values: Averages = {**averages, **self._generate()}
            self.log.log("eval", self.position.step, values)
        found = score(averages, self.options.best_by)
        self.position = self.position.model_copy(update={"evaluation": values, "score": found})
        if found is None or self.position.step == 0 or (self.best_score is not None and found < self.best_score):
            return False
        self.best_score = found
        return self.options.keep_best > 0

    def _generate(self) -> dict[str, float]:
        """The numbers of the real-generation evaluation, on the main process; the others wait for it."""
        if self.evaluate_generate is None:
            return {}
        weights = whole(self.draft_loss.draft.state_dict())
        values: dict[str, float] = {}
        failure = None
        if self.accelerator.is_main_process:
            config = self.draft_loss.draft.config
            with torch.device("meta"):
                draft = Draft(config)
            draft.load_state_dict({n: w.to(config.torch_dtype, copy=True) for n, w in weights.items()}, assign=True)
            try:
                values = self.evaluate_generate(draft.to(self.device).eval())
            except DraftsmithError as error:
                failure = error
        raise_together(failure)
        return {f"generate_{name}": value for name, value in values.items()}

    def _log_window(self, rate: float, norm: Tensor, epoch: int) -> None:
        self._judge(all_of_them=True)
        averages = {name: value for name, value in self.window.averages().items() if name not in _STEERING}
        self.shown = {name: f"{value:.3g}" for name, value in averages.items() if isinstance(value, float)}
        tokens, flops = self.clock.totals(self.accelerator)
        seconds = self.clock.seconds  # after the averages, which wait for the device
        values: dict[str, Any] = {
            **averages,
            "epoch": float(epoch),
            "lr": rate,
            "grad_norm": float(norm),
            "tokens_per_second": tokens / seconds,
            "data_wait": self.clock.waited / seconds,
            "memory_gib": memory_bytes(self.device) / 2**30,
        }
        if self.peak is not None:
            values["mfu"] = flops / (seconds * self.peak * self.accelerator.num_processes)
        if self.options.skip_nonfinite:
            values["skipped"] = float(self.skipped)
        self.log.log("train", self.position.step, values)
        self.window, self.clock = Sums(), Clock()


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _generators(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_generators(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:  # the run may go on where there is no GPU
        torch.cuda.set_rng_state(states["cuda"], device)
