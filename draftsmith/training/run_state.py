"""Where a run is and what it remembers of itself, beside the weights and the optimiser; and how it is saved."""

import torch
from accelerate.utils import gather_object
from torch import Tensor

from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.parallel.processes import raise_together
from draftsmith.training.checkpoint import Checkpoint, Position, RunCheckpoints
from draftsmith.training.clock import Window
from draftsmith.training.parallel import Parallel
from draftsmith.training.sums import Sums
from draftsmith.training.update import Updater


class RunState:
    """position: steps done, and the last evaluation; best_score: the highest of all evaluations that were saved
    (None: none); skipped: steps that were left out; window: what was not logged yet."""

    def __init__(self, draft: Draft, updater: Updater, parallel: Parallel, window: Window) -> None:
        self._draft = draft
        self._updater = updater
        self._parallel = parallel
        self.position = Position(step=0, epoch=0, step_in_epoch=0)
        self.best_score: float | None = None
        self.skipped = 0
        self.window = window

    def restore(self, checkpoint: Checkpoint, best: Checkpoint | None) -> None:
        """Stand exactly where `checkpoint` was saved, weights, optimiser and generators included. best: the evaluated
        checkpoint of the highest score."""
        checkpoint.read_into(self._draft.state_dict(), self._updater.tensors())
        state, device = checkpoint.state(), self._draft.device
        self.window.sums = Sums.from_state(state["window"], device)
        self.skipped = state["skipped"]
        self.position = checkpoint.position
        self.best_score = best.position.score if best is not None else None
        rank = self._parallel.accelerator.process_index
        if rank < len(state["generators"]):
            _set_generators(state["generators"][rank], device)

    def save(self, checkpoints: RunCheckpoints, *, keep_last: int, keep_best: int) -> None:
        """Write a checkpoint of this moment, and drop the ones that are not to be kept. All processes call it, and all
        raise where one fails."""
        accelerator = self._parallel.accelerator
        state = {
            "window": self.window.sums.state_dict(),
            "skipped": self.skipped,
            "generators": gather_object([_generators(self._draft.device)]),
        }
        weights, optimizer = self._draft.state_dict(), self._updater.tensors()
        if self._parallel.sharded:
            checkpoints.save_sharded(self.position, weights, optimizer, state, accelerator)
        else:
            failure = None
            if accelerator.is_main_process:
                try:
                    checkpoints.save(self.position, weights, {**state, "optimizer": optimizer})
                except DraftsmithError as error:
                    failure = error
            raise_together(failure)
        if accelerator.is_main_process:
            checkpoints.prune(keep_last, keep_best)
        accelerator.wait_for_everyone()


def _generators(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_generators(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:  # the run may go on where there is no GPU
        torch.cuda.set_rng_state(states["cuda"], device)
