"""The training loop. It knows steps, sums and schedules, and no method."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from draftsmith.drafts.draft import Draft
from draftsmith.progress import Stage
from draftsmith.training.batches import MicroBatch, Step, StepPlan, TrainingBatches
from draftsmith.training.checkpoint import Checkpoint, Position, RunCheckpoints
from draftsmith.training.evaluation import Evaluation, score
from draftsmith.training.forward import DraftLoss
from draftsmith.training.guards import MicroBatchRecord, find_non_finite, stop_run
from draftsmith.training.interruption import StopRequest
from draftsmith.training.options import TrainOptions
from draftsmith.training.schedule import build_optimizer, learning_rate
from draftsmith.training.sums import Averages, Sums
from draftsmith.training.tracking import RunLog, Values, memory_bytes

EvaluateGenerate = Callable[[Draft], dict[str, float]]
"""A real-generation evaluation: gets the draft in its export dtype, returns named numbers."""

# Sums that steer the step rather than describe it; they travel with the metrics in the step's one reduction.
_GRADIENT, _TOKENS, _STOP = "_gradient", "_tokens", "_stop"


class Loop:
    """Trains from wherever it stands until `total_steps` or a request to stop.

    An optimiser step: every process forwards its micro-batches and adds up gradients of the objective's numerators; all
    sums are reduced over the processes; the gradient is divided once, by the global denominator; it is clipped and
    applied. `draft_loss` is the trained module and `forward` the same, wrapped for gradient synchronisation where
    there is more than one process.
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
    ) -> None:
        self.draft_loss = draft_loss
        self.forward = accelerator.prepare_model(draft_loss) if accelerator.num_processes > 1 else draft_loss
        self.optimizer = build_optimizer(draft_loss, options, device)
        self.plan, self.batches = plan, batches
        self.evaluation, self.evaluate_generate = evaluation, evaluate_generate
        self.options, self.total_steps = options, total_steps
        self.accelerator, self.device = accelerator, device
        self.checkpoints, self.log = checkpoints, log
        self.position = Position(step=0, epoch=0, step_in_epoch=0)
        self.best_score: float | None = None
        self.window = Sums()  # metrics since the last log entry, over all processes
        self.clock = _Clock()
        self.shown: dict[str, str] = {}  # beside the progress bar

    # --- state ------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint) -> None:
        """Stand exactly where `checkpoint` was saved."""
        state = checkpoint.state()
        self.draft_loss.draft.load_state_dict(checkpoint.weights())
        self.optimizer.load_state_dict(state["optimizer"])
        self.window = Sums.from_state(state["window"], self.device)
        self.position = checkpoint.position
        best = self.checkpoints.best()
        self.best_score = best.position.score if best is not None else None
        if self.accelerator.process_index < len(state["generators"]):
            _set_generators(state["generators"][self.accelerator.process_index])

    def save(self) -> None:
        """Write a checkpoint of this moment, and drop the ones that are not to be kept."""
        with self.clock.stopped():
            generators = gather_object([_generators(self.device)])
            if self.accelerator.is_main_process:
                state = {
                    "optimizer": self.optimizer.state_dict(),
                    "window": self.window.state_dict(),
                    "generators": generators,
                }
                self.checkpoints.save(self.position, self.draft_loss.draft.state_dict(), state)
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
            self.clock = _Clock()
            start = self.position
            for step in self.batches.steps(start.epoch, start.step_in_epoch, self.total_steps - start.step):
                stopped = self._step(step, request, stage)
                done = self.position.step
                last = done == self.total_steps
                improved = (last or _due(done, self.options.eval_every)) and not stopped and self.evaluate()
                if last or stopped or improved or _due(done, self.options.save_every):
                    self.save()
                if stopped and not last:
                    return request.signal_name or "a signal to another process"
        return None

    def _step(self, step: Step, request: StopRequest, stage: Stage) -> bool:
        """One optimiser step; returns whether any process was asked to stop."""
        done = self.position.step
        self.optimizer.zero_grad(set_to_none=True)
        sums, records = Sums(), []
        for number in range(step.num_forwards):
            batch = self._next(step)
            last = number + 1 == step.num_forwards
            with nullcontext() if last else self.accelerator.no_sync(self.forward):
                numerator, denominator, metrics = self.forward(batch, done / self.total_steps)
                numerator.backward()
            sums.add(_GRADIENT, numerator, denominator)
            sums.add(_TOKENS, *self._count(batch.tokens))
            for name, pair in metrics.items():
                sums.add(name, *pair)
            records.append(MicroBatchRecord(batch.packed.sample_ids, numerator.detach()))
        sums.add(_STOP, *self._count(request.signal_name is not None))
        sums = sums.over_ranks(self.accelerator)

        rate = learning_rate(done, self.total_steps, self.options)
        norm = self._update(sums, records, rate)

        for name in metrics:
            self.window.add(name, *sums[name])
        self.clock.tokens += float(sums[_TOKENS][0])
        following = self.plan.following(step.epoch, step.step_in_epoch)
        self.position = Position(step=done + 1, epoch=following[0], step_in_epoch=following[1])
        if _due(done + 1, self.log.options.every) or done + 1 == self.total_steps:
            self._log_window(rate, norm, step.epoch)
        stage.advance(1, **self.shown)
        return bool(sums[_STOP][0] > 0)

    def _update(self, sums: Sums, records: list[MicroBatchRecord], rate: float) -> float:
        """Divide the summed gradients, clip them, apply them; returns their norm before clipping."""
        numerator, denominator = sums[_GRADIENT]
        parameters = [p for p in self.draft_loss.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        # DDP has averaged over the processes, where the sum is wanted. A step without a label has nothing to divide.
        scale = torch.where(denominator > 0, self.accelerator.num_processes / denominator.clamp_min(1e-300), 0.0)
        torch._foreach_mul_(gradients, scale.float())
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm + numerator):
            report = find_non_finite(
                self.draft_loss.draft,
                records,
                step=self.position.step,
                rank=self.accelerator.process_index,
                learning_rate=rate,
            )
            stop_run(report, self.checkpoints.directory.parent / "debug")
        if self.options.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.options.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return float(norm)

    def _next(self, step: Step) -> MicroBatch:
        started = time.perf_counter()
        batch = next(step.micro_batches)
        self.clock.waited += time.perf_counter() - started
        return batch.to(self.device)

    def _count(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(float(number), device=self.device), torch.ones((), device=self.device)

    # --- numbers ----------------------------------------------------------------------------------------------------

    def evaluate(self) -> bool:
        """Evaluate on the held-out documents; returns whether that is the best so far (and worth a checkpoint)."""
        if self.evaluation is None:
            return False
        with self.clock.stopped():
            progress = min(self.position.step, self.total_steps - 1) / self.total_steps
            averages = self.evaluation.run(self.draft_loss, self.device, progress, self.accelerator)
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
        values: dict[str, float] = {}
        if self.evaluate_generate is not None and self.accelerator.is_main_process:
            draft = copy.deepcopy(self.draft_loss.draft)
            values = self.evaluate_generate(draft.to(draft.config.torch_dtype).eval())
        self.accelerator.wait_for_everyone()
        return {f"generate_{name}": value for name, value in values.items()}

    def _log_window(self, rate: float, norm: float, epoch: int) -> None:
        seconds = self.clock.seconds
        averages = self.window.averages()
        self.shown = {name: f"{value:.3g}" for name, value in averages.items() if isinstance(value, float)}
        values: Values = {
            **averages,
            "epoch": float(epoch),
            "lr": rate,
            "grad_norm": norm,
            "tokens_per_second": self.clock.tokens / seconds,
            "data_wait": self.clock.waited / seconds,
            "memory_gib": memory_bytes(self.device) / 2**30,
        }
        self.log.log("train", self.position.step, values)
        self.window, self.clock = Sums(), _Clock()


class _Clock:
    """Time, tokens and waiting for data since the last log entry; evaluation and saving do not count."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.waited = 0.0
        self.tokens = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @contextmanager
    def stopped(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._started += time.perf_counter() - before


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _generators(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_generators(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
