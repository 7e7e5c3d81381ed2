"""Run checkpoints: everything a run needs to go on, in directories that are either whole or not there."""

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.training.sums import Averages

_log = logging.getLogger(__name__)

WEIGHTS = "draft.safetensors"
STATE = "state.pt"
POSITION = "position.json"


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
    """One whole checkpoint on disk."""

    directory: Path
    position: Position

    def weights(self) -> dict[str, Tensor]:
        """The draft's parameters, float32, by their name in the draft's state dict."""
        return load_file(self.directory / WEIGHTS)

    def state(self) -> dict[str, Any]:
        """Optimiser state, generator states and running sums, as given to `save`."""
        state: dict[str, Any] = torch.load(self.directory / STATE, map_location="cpu", weights_only=True)
        return state


class RunCheckpoints:
    """The checkpoints of one run under `directory`, named by step.

    A checkpoint is written under a temporary name, flushed to disk and renamed; older ones are removed only after that.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, position: Position, weights: dict[str, Tensor], state: dict[str, Any]) -> Checkpoint:
        """Write one checkpoint. A failure to write (a full disk, say) leaves every earlier one as it was."""
        final = self.directory / f"step-{position.step:08d}"
        partial, replaced = final.with_suffix(".partial"), final.with_suffix(".replaced")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, partial / WEIGHTS)
            _save_state(state, partial / STATE)
            position = position.model_copy(
                update={"files": {name: (partial / name).stat().st_size for name in (WEIGHTS, STATE)}}
            )
            (partial / POSITION).write_text(position.model_dump_json(indent=1))
            for name in (WEIGHTS, STATE, POSITION):
                _flush(partial / name)
            _flush(partial)
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
            _flush(self.directory)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            kept = self.latest()
            raise DraftsmithError(
                f"the checkpoint of step {position.step} could not be written under {self.directory}: {error}; "
                + (f"the one of step {kept.position.step} is intact" if kept else "there is no earlier one")
                + "; make room and run again with --resume"
            ) from error
        shutil.rmtree(replaced, ignore_errors=True)
        return Checkpoint(final, position)

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
                shutil.rmtree(checkpoint.directory)
        for leftover in (*self.directory.glob("step-*.partial"), *self.directory.glob("step-*.replaced")):
            shutil.rmtree(leftover)


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
    for name in (WEIGHTS, STATE):
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != position.files.get(name):
            return f"{name} has {path.stat().st_size} bytes, {position.files.get(name)} were written"
    return None


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
