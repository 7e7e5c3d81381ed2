"""Run checkpoints: everything a run needs to go on, in directories that are either whole or not there."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed.checkpoint as sharded_files
from accelerate import Accelerator
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor

from draftsmith.errors import DraftsmithError
from draftsmith.parallel.processes import raise_together
from draftsmith.training.sums import Averages

_log = logging.getLogger(__name__)

WEIGHTS = "draft.safetensors"
STATE = "state.pt"
POSITION = "position.json"
SHARDS = "shards"
_WEIGHT = "weight."  # in front of the names of weights beside the optimiser's, in a sharded checkpoint


class Position(BaseModel):
    """Where a run stands after `step` optimiser steps (JSON in the checkpoint).

    `epoch` and `step_in_epoch` say which step comes next; `evaluation` holds the held-out averages measured at this
    step, if any were, and `score` the one that says which checkpoint is best (higher is better); `files` the size of
    every other file, by which a damaged checkpoint is recognised.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    epoch: int
    step_in_epoch: int
    evaluation: Averages | None = None
    score: float | None = None
    files: dict[str, int] = {}


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint on disk: written by one process (`draft.safetensors`, `state.pt`) or by several, each its
    own part (`shards/` in the format of torch.distributed.checkpoint, and `state.pt`)."""

    directory: Path
    position: Position

    @property
    def sharded(self) -> bool:
        """Whether several processes wrote their parts of it."""
        return (self.directory / SHARDS).is_dir()

    def weights(self) -> dict[str, Tensor]:
        """The draft's parameters, whole, float32, by their name in the draft's state dict."""
        if not self.sharded:
            try:
                return load_file(self.directory / WEIGHTS)
            except (OSError, SafetensorError) as error:
                raise self._unreadable(WEIGHTS, error) from error
        metadata = sharded_files.FileSystemReader(self.directory / SHARDS).read_metadata().state_dict_metadata
        found: dict[str, Any] = {name: entry for name, entry in metadata.items() if name.startswith(_WEIGHT)}
        tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()}
        sharded_files.load(tensors, checkpoint_id=self.directory / SHARDS, no_dist=True)
        return {name.removeprefix(_WEIGHT): tensor for name, tensor in tensors.items()}

    def state(self) -> dict[str, Any]:
        """Generator states, running sums and (unless sharded) the optimiser's tensors, as given to `save`."""
        try:
            state: dict[str, Any] = torch.load(self.directory / STATE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise self._unreadable(STATE, error) from error
        return state

    def _unreadable(self, name: str, error: Exception) -> DraftsmithError:
        reason = str(error).partition("\n")[0]
        return DraftsmithError(
            f"{self.directory / name} has the size that was written and cannot be read ({reason}); remove "
            f"{self.directory} to go on from an earlier checkpoint"
        )

    @torch.no_grad()
    def read_into(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Fill tensors, whole or sharded, by whatever number of processes the checkpoint was written. All processes
        call it."""
        if self.sharded:
            sharded_files.load(_beside(weights, optimizer), checkpoint_id=self.directory / SHARDS)
            return
        saved = (self.weights(), self.state()["optimizer"])
        for targets, values in zip((weights, optimizer), saved, strict=True):
            for name, target in targets.items():
                _fill(target, values[name])


def _beside(weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> dict[str, Any]:
    return {**{_WEIGHT + name: tensor.detach() for name, tensor in weights.items()}, **optimizer}


def _fill(target: Tensor, value: Tensor) -> None:
    if isinstance(target, DTensor):
        part = distribute_tensor(
            value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        ).to_local()
        target.to_local().copy_(part)
    else:
        target.copy_(value)


class RunCheckpoints:
    """The checkpoints of one run under `directory`, named by step.

    A checkpoint is written under a temporary name, flushed to disk and renamed; older ones are removed only after that.
    A failure to write (a full disk, say) leaves every earlier one as it was, and is a `DraftsmithError` that says so.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, position: Position, weights: Mapping[str, Tensor], state: dict[str, Any]) -> Checkpoint:
        """Write one checkpoint, whole, by this process alone. state: whatever `torch.load(weights_only=True)` reads;
        its "optimizer" holds the tensors that `Checkpoint.read_into` fills by name."""
        partial = self._partial(position)
        try:
            self._make(partial)
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, partial / WEIGHTS)
            return self._finish(partial, position, state)
        except (OSError, SafetensorError) as error:
            raise self._not_written(position, error) from error

    def save_sharded(
        self,
        position: Position,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: dict[str, Any],
        accelerator: Accelerator,
    ) -> None:
        """Write one checkpoint, each process its own part of the tensors; all processes call it, and all raise where
        one fails."""
        partial, failure = self._partial(position), None
        if accelerator.is_main_process:
            try:
                self._make(partial)
            except OSError as error:
                failure = self._not_written(position, error)
        raise_together(failure)
        try:
            sharded_files.save(_beside(weights, optimizer), checkpoint_id=partial / SHARDS)
        except OSError as error:
            failure = self._not_written(position, error)
        except CheckpointException as error:
            failure = self._not_written(position, _reasons(error))
        raise_together(failure)
        if accelerator.is_main_process:
            try:
                self._finish(partial, position, state)
            except OSError as error:
                failure = self._not_written(position, error)
        raise_together(failure)

    def _partial(self, position: Position) -> Path:
        return self.directory / f"step-{position.step:08d}.partial"

    def _make(self, partial: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    def _finish(self, partial: Path, position: Position, state: dict[str, Any]) -> Checkpoint:
        """Write the rest, flush everything, and give the directory its name."""
        _save_state(state, partial / STATE)
        files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        sizes = {path.relative_to(partial).as_posix(): path.stat().st_size for path in files}
        position = position.model_copy(update={"files": sizes})
        (partial / POSITION).write_text(position.model_dump_json(indent=1))
        for path in (*files, partial / POSITION, partial):
            _flush(path)
        final = partial.with_suffix("")
        replaced = final.with_suffix(".replaced")
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        _flush(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        return Checkpoint(final, position)

    def _not_written(self, position: Position, error: BaseException | str) -> DraftsmithError:
        shutil.rmtree(self._partial(position), ignore_errors=True)
        kept = self.latest()
        return DraftsmithError(
            f"the checkpoint of step {position.step} could not be written under {self.directory}: {error}; "
            + (f"the one of step {kept.position.step} is intact" if kept else "there is no earlier one")
            + "; make room and run again with --resume"
        )

    def all(self) -> list[Checkpoint]:
        """Every whole checkpoint, oldest first. Damaged ones are named in a warning and left out."""
        found = []
        for directory in sorted(self.directory.glob("step-*")):
            if directory.suffix or not directory.is_dir():
                continue  # being written, or being replaced, when its process died
            fault = _fault(directory)
            if fault is None:
                found.append(Checkpoint(directory, _read_position(directory)))
            else:
                _log.warning("checkpoint %s is damaged and not used: %s", directory, fault)
        return found

    def latest(self) -> Checkpoint | None:
        """The whole checkpoint of the highest step, or None; damaged ones are left out, with a warning."""
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def best(self) -> Checkpoint | None:
        """The evaluated checkpoint of the highest score (the latest of equals), or None where none was evaluated."""
        ranked = _by_score(self.all())
        return ranked[0] if ranked else None

    def prune(self, keep_last: int, keep_best: int) -> None:
        """Remove all but the newest `keep_last` and the best `keep_best`, and what killed processes left behind."""
        checkpoints = self.all()
        kept = {c.position.step for c in (*checkpoints[-keep_last:], *_by_score(checkpoints)[:keep_best])}
        for checkpoint in checkpoints:
            if checkpoint.position.step not in kept:
                _remove(checkpoint.directory)
        for leftover in (*self.directory.glob("step-*.partial"), *self.directory.glob("step-*.replaced")):
            _remove(leftover)


def _remove(directory: Path) -> None:
    """What stays only takes room: no reason to end a training."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        _log.warning("%s is not needed any more and cannot be removed: %s", directory, error)


def _by_score(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    scored = [(c.position.score, c.position.step, c) for c in checkpoints if c.position.score is not None]
    return [checkpoint for _, _, checkpoint in sorted(scored, key=lambda entry: entry[:2], reverse=True)]


def _read_position(directory: Path) -> Position:
    return Position.model_validate_json((directory / POSITION).read_text())


def _fault(directory: Path) -> str | None:
    """What makes the checkpoint unusable, or None."""
    try:
        position = _read_position(directory)
    except FileNotFoundError:
        return f"{POSITION} is missing"
    except (ValidationError, json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"{POSITION} cannot be read: {error}"
    for name, size in position.files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
    return None if position.files else f"{POSITION} names no files"


def _reasons(error: CheckpointException) -> str:
    """Why each process that failed did."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    # A failed write makes torch fail once more while it closes the file; the first failure is the reason.
    first = {r: f.__context__ if isinstance(f.__context__, OSError) else f for r, f in failures.items()}
    return "; ".join(f"process {rank}: {failure}" for rank, failure in first.items())


def _save_state(state: dict[str, Any], path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        # A failed write makes torch fail once more while it closes the archive; the first failure is the reason.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
