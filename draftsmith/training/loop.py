"""The training loop. It knows steps, sums and schedules, and no method."""

import logging

import torch

from draftsmith.base.progress import Stage
from draftsmith.training.checkpoint import Checkpoint, Position, RunCheckpoints
from draftsmith.training.clock import Window
from draftsmith.training.evaluation import score
from draftsmith.training.forward import share_done
from draftsmith.training.graphs import BatchGraphs
from draftsmith.training.guards import (
    MicroBatchRecord,
    NonFiniteError,
    StepRecord,
    Verdicts,
    find_non_finite,
    write_report,
)
from draftsmith.training.hooks import Hooks
from draftsmith.training.interruption import StopRequest
from draftsmith.training.loading import Step
from draftsmith.training.micro_batch import MicroBatch
from draftsmith.training.parallel import Parallel
from draftsmith.training.peak import peak_flops
from draftsmith.training.prepare import Training
from draftsmith.training.run_state import RunState
from draftsmith.training.schedule import learning_rate
from draftsmith.training.sums import Averages, Sums
from draftsmith.training.tracking import RunLog
from draftsmith.training.update import Updater

_log = logging.getLogger(__name__)

# Sums that steer the step rather than describe it; they travel with the metrics in the step's one reduction.
_GRADIENT, _STOP = "_gradient", "_stop"


class Loop:
    """Trains from wherever its `state` is until the last step or a request to stop.

    An optimiser step: every process forwards its micro-batches and adds up gradients of the objective's numerators; all
    sums are reduced over the processes; the gradient is divided once, by the global denominator; it is clipped and
    applied. Between two log entries the host waits for the device only where `Verdicts` does.
    """

    def __init__(self, training: Training, checkpoints: RunCheckpoints, log: RunLog, hooks: Hooks) -> None:
        self.training, self.options = training, training.options
        self.loss = training.loss
        self.accelerator, self.device = training.accelerator, training.device
        self.parallel = Parallel(self.loss, self.options.parallel, self.accelerator)
        self.updater = Updater(self.loss, self.parallel, self.options)
        self.graphs = BatchGraphs(self.parallel.forward, list(self.loss.parameters())) if self.options.graphs else None
        self.checkpoints, self.log, self.hooks = checkpoints, log, hooks
        window = Window(self.device, peak_flops(self.device, log.options.peak_tflops))
        self.state = RunState(self.loss.draft, self.updater, self.parallel, window)
        self.verdicts = Verdicts(self.device, _lag(self.device))
        self.stopping = False
        self.shown: dict[str, str] = {}  # beside the progress bar

    def restore(self, checkpoint: Checkpoint) -> None:
        """Stand exactly where `checkpoint` was saved."""
        self.state.restore(checkpoint, self.checkpoints.best())

    def run(self, stage: Stage) -> str | None:
        """Train to the end; returns None, or the signal that stopped the run early. The last state is saved either
        way."""
        # A request to stop has precedence over an evaluation, which is then still to be made.
        start, total = self.state.position, self.training.total_steps
        due = start.step == 0 or _due(start.step, self.options.eval_every)
        if due and start.evaluation is None and self._evaluate():
            self._save()
        with StopRequest() as request:
            self.state.window.start()
            for step in self.training.batches.steps(start.epoch, start.step_in_epoch, total - start.step):
                self._step(step, request, stage)
                stopped = self.stopping
                done = self.state.position.step
                last = done == total
                improved = (last or _due(done, self.options.eval_every)) and not stopped and self._evaluate()
                if last or stopped or improved or _due(done, self.options.save_every):
                    self._save()
                if stopped and not last:
                    return request.signal_name or "a signal to another process"
        return None

    def _step(self, step: Step, request: StopRequest, stage: Stage) -> None:
        """One optimiser step; `self.stopping` says, as far as is known, whether any process was asked to stop."""
        done, total = self.state.position.step, self.training.total_steps
        self.updater.clear()
        sums, forwards = Sums(), []
        # Filled on the device: a tensor made of a Python number would be copied there, and the copy waited for.
        asked = torch.full((), float(request.signal_name is not None), device=self.device)
        progress = share_done(done, total, self.device)
        for number in range(step.num_forwards):
            batch = self._next(step)
            with self.parallel.accumulating(last=number + 1 == step.num_forwards):
                if self.graphs is not None:
                    numerator, denominator, metrics = self.graphs.run(batch, progress)
                else:
                    numerator, denominator, metrics = self.parallel.forward(batch, progress)
                    numerator.backward()
            sums = sums.plus(Sums.of({_GRADIENT: (numerator, denominator), _STOP: (asked, asked), **metrics}))
            self.state.window.clock.add(batch.work)
            # A copy: the next replay of a graph writes where this one wrote.
            forwards.append(MicroBatchRecord(batch.packed.sample_ids, numerator.detach().clone()))
        sums = sums.over_ranks(self.accelerator)

        self._judge()
        rate = learning_rate(done, total, self.options)
        update = self.updater.apply(*sums[_GRADIENT], rate)
        self.verdicts.add(StepRecord(done, rate, update, sums[_STOP][0], forwards))

        # A step that is left out leaves the averages alone as well.
        self.state.window.add(sums.where(update.finite))
        following = self.training.plan.following(step.epoch, step.step_in_epoch)
        self.state.position = Position(step=done + 1, epoch=following[0], step_in_epoch=following[1])
        self._judge()
        if _due(done + 1, self.log.options.every) or done + 1 == total:
            self._log_window(rate, update.norm, step.epoch)
        stage.advance(1, **self.shown)

    def _judge(self, *, all_of_them: bool = False) -> None:
        """Look at the steps whose outcome is due: stop at one that was not finite, or count it."""
        for verdict in self.verdicts.take(all_of_them=all_of_them):
            self.stopping = self.stopping or verdict.stopping
            if verdict.finite:
                continue
            rank = self.accelerator.process_index
            report = find_non_finite(self.loss, self.updater.names, verdict.record, rank)
            path = write_report(report, self.checkpoints.directory.parent / "debug")
            if not self.options.skip_nonfinite:
                raise NonFiniteError(
                    f"{report}. Debug record: {path}. Lower train.lr, look at these documents, resume from the last "
                    "checkpoint, or leave such steps out with train.skip_nonfinite"
                )
            self.state.skipped += 1
            _log.warning("%s; left out (debug record: %s)", report, path)

    def _next(self, step: Step) -> MicroBatch:
        with self.state.window.clock.waiting():
            return next(step.micro_batches)

    def _save(self) -> None:
        self._judge(all_of_them=True)
        with self.state.window.clock.stopped():
            self.state.save(self.checkpoints, keep_last=self.options.keep_last, keep_best=self.options.keep_best)

    def _evaluate(self) -> bool:
        """Evaluate on the held-out documents; returns whether that is the best so far (and worth a checkpoint)."""
        evaluation, state = self.training.evaluation, self.state
        if evaluation is None:
            return False
        self._judge(all_of_them=True)
        with state.window.clock.stopped():
            total = self.training.total_steps
            progress = share_done(min(state.position.step, total - 1), total, self.device)
            averages = evaluation.run(self.loss, self.device, progress, self.accelerator)
            self.parallel.after_forward_only()
            values: Averages = {**averages, **self.hooks.generate(self.loss.draft, self.accelerator)}
            self.log.log("eval", state.position.step, values)
        found = score(averages, self.options.best_by)
        state.position = state.position.model_copy(update={"evaluation": values, "score": found})
        if found is None or state.position.step == 0 or (state.best_score is not None and found < state.best_score):
            return False
        state.best_score = found
        return self.options.keep_best > 0

    def _log_window(self, rate: float, norm: torch.Tensor, epoch: int) -> None:
        self._judge(all_of_them=True)
        window = self.state.window
        averages = window.averages()
        self.shown = {name: f"{value:.3g}" for name, value in averages.items() if isinstance(value, float)}
        entry = window.entry(averages, self.accelerator, epoch=float(epoch), lr=rate, grad_norm=float(norm))
        if self.options.skip_nonfinite:
            entry["skipped"] = float(self.state.skipped)
        self.log.log("train", self.state.position.step, entry)
        window.clear()


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _lag(device: torch.device) -> int:
    """How many steps the host may be ahead of what it knows; see `Verdicts`."""
    return 1 if device.type == "cuda" else 0
