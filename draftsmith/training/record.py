"""What a run is: written once when it starts, read when it resumes and when its draft is exported."""

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from draftsmith.base.files import replacing
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.training.checkpoint import Checkpoint, RunCheckpoints
from draftsmith.training.options import RESUME_FIXED

_log = logging.getLogger(__name__)

RECORD_FILE = "run.json"
LOCK_FILE = "lock"
CHECKPOINTS = "checkpoints"


class RunRecord(BaseModel):
    """`run.json`: the recipe's `draft` and `train` sections, the complete draft configuration, which store and target
    the run learns from (`store`: the sha256 of its index), and the run's ids in external trackers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    draft_section: dict[str, Any]
    draft_config: dict[str, Any]
    options: dict[str, Any]
    store: str
    store_directory: str
    target: dict[str, Any]
    tracker_ids: dict[str, str]

    def check_resume(self, section: dict[str, Any], options: dict[str, Any], store: str) -> None:
        """Raise `DraftsmithError` unless a run with these settings continues this one; names every difference.

        `init_from` is not asked: the run no longer depends on where it started from.
        """
        found = [
            f"draft.{name}: the run has {self.draft_section.get(name)!r}, the recipe {section.get(name)!r}"
            for name in sorted({*self.draft_section, *section} - {"init_from"})
            if self.draft_section.get(name) != section.get(name)
        ]
        found += [
            f"train.{name}: the run has {self.options.get(name)!r}, the recipe {options[name]!r}"
            for name in RESUME_FIXED
            if self.options.get(name) != options[name]
        ]
        if self.store != store:
            found.append(f"the feature store: the run learns from index {self.store[:12]}, this one has {store[:12]}")
        if found:
            raise DraftsmithError(
                "the run cannot be resumed with other settings: "
                + "; ".join(found)
                + ". Set them back, or start another run in another directory"
            )


def read_record(run_dir: Path) -> RunRecord:
    """Raises `DraftsmithError` where `run_dir` is not a run, or its record is damaged."""
    path = run_dir / RECORD_FILE
    if not path.is_file():
        raise DraftsmithError(f"{run_dir} is not a training run: it has no {RECORD_FILE}")
    try:
        return RunRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise DraftsmithError(f"{path} cannot be read: {error}") from error


def claim(run_dir: Path) -> BinaryIO:
    """Makes the run directory this process's own, as long as the file that it gives is open and the process lives.

    Raises `DraftsmithError` while another process trains there, or where there can be no such directory.
    """
    path = run_dir / LOCK_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise DraftsmithError(f"the run directory {run_dir} cannot be made ({error}); choose another") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise DraftsmithError(
                f"another process trains in {run_dir} (process {path.read_text().strip()}); wait for it or end it, or "
                "choose another directory"
            ) from error
        _log.warning("%s cannot be locked (%s): see that nothing else trains there", path, error)
    file.truncate(0)
    file.write(f"{os.getpid()} on {socket.gethostname()}".encode())
    return file


def write_record(run_dir: Path, record: RunRecord) -> None:
    """Writes `run.json`, whole or not at all. Raises `DraftsmithError` where the disk refuses."""
    with replacing(run_dir / RECORD_FILE) as file:
        file.write(record.model_dump_json(indent=1).encode())


def load_run(run_dir: Path | str, which: Literal["best", "last"] = "best") -> Draft:
    """The draft of a run's best or last checkpoint, on the CPU, in the dtype that its configuration exports.

    Raises `DraftsmithError` where there is no run, no whole checkpoint, or, for `best`, no evaluated one.
    """
    run_dir = Path(run_dir)
    record = read_record(run_dir)
    checkpoint = find_checkpoint(run_dir, which)
    draft = Draft.from_config(record.draft_config)
    draft.load_state_dict(checkpoint.weights())
    return draft.to(draft.config.torch_dtype).eval()


def find_checkpoint(run_dir: Path, which: Literal["best", "last"]) -> Checkpoint:
    """The checkpoint meant by `which`; raises as `load_run` does."""
    checkpoints = RunCheckpoints(run_dir / CHECKPOINTS)
    latest = checkpoints.latest()
    if latest is None:
        raise DraftsmithError(f"{checkpoints.directory} holds no whole checkpoint; train the run first")
    if which == "last":
        return latest
    best = checkpoints.best()
    if best is None:
        raise DraftsmithError(
            f"no checkpoint of {run_dir} was evaluated, so none is best; take 'last', or hold out a train.eval_share"
        )
    return best
