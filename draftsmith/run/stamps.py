"""Which stages of a run directory are done, and with what settings."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError, differences

STAGES = "stages"
"""The directory of a run that holds the stamps; a directory that has it is a run."""


@dataclass(frozen=True)
class Stamps:
    """The stamps of one run directory: per stage a JSON file with its settings and whether it is finished.

    `redo`: what happens to a stage whose settings have changed: True, its outputs are removed and it runs again; False,
    it is an error that names the changed settings. `without_effect`: stage -> section -> fields that are not compared;
    a stamp may hold them, written when they counted.
    """

    run: Path
    redo: bool
    without_effect: Mapping[str, Mapping[str, Collection[str]]] = field(default_factory=dict)

    def perform(
        self,
        stage: str,
        settings: Mapping[str, Any],
        outputs: Sequence[Path],
        work: Callable[[], bool | None],
        *,
        redo: bool = False,
        keep_changed: bool = False,
        whole: Callable[[], bool] | None = None,
    ) -> bool:
        """Runs `work` unless the stage is finished with these settings and all its `outputs` are there, and `whole`
        (where it is given) says that nothing is missing in them.

        A stage that was interrupted under the same settings is continued: its outputs are left for `work` to pick up.
        With changed settings, and neither `redo` here nor in the constructor, `DraftsmithError` names them;
        `keep_changed` leaves outputs in place all the same, for work that checks by itself what may change. `work` may
        return whether the stage is finished with it; work that returns nothing finishes it. Returns whether the work
        ran.
        """
        settings = json.loads(json.dumps(settings, default=str))
        stamp = self._read(stage)
        if stamp is not None and stamp["settings"] != settings:
            if not keep_changed:
                if not (redo or self.redo):
                    raise DraftsmithError(self._changed(stage, stamp["settings"], settings))
                self.forget(stage, outputs)
            stamp = None
        there = stamp is not None and stamp["finished"] and all(path.exists() for path in outputs)
        if there and (whole is None or whole()):
            return False
        self._write(stage, settings, finished=False)
        finished = work()
        self._write(stage, settings, finished=finished is None or finished)
        return True

    def finished(self, stage: str) -> dict[str, Any] | None:
        """The settings that a finished stage was done with; None for one that is not finished."""
        stamp = self._read(stage)
        return stamp["settings"] if stamp is not None and stamp["finished"] else None

    def begun(self, stage: str) -> tuple[dict[str, Any], bool] | None:
        """The settings of a stage that was begun, and whether it is finished; None for one that was not."""
        stamp = self._read(stage)
        return None if stamp is None else (stamp["settings"], bool(stamp["finished"]))

    def forget(self, stage: str, outputs: Sequence[Path]) -> None:
        """Removes a stage's stamp and outputs."""
        self._path(stage).unlink(missing_ok=True)
        for path in outputs:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _path(self, stage: str) -> Path:
        return self.run / STAGES / f"{stage}.json"

    def _read(self, stage: str) -> dict[str, Any] | None:
        path = self._path(stage)
        if not path.exists():
            return None
        try:
            stamp = json.loads(path.read_text(encoding="utf-8"))
            return {"settings": self._compared(stage, stamp["settings"]), "finished": stamp["finished"]}
        except (KeyError, TypeError, ValueError) as error:
            raise DraftsmithError(
                f"{path} is damaged ({error}); remove it to run the stage `{stage}` again from what its outputs hold"
            ) from error

    def _compared(self, stage: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings without the fields that have no effect."""
        compared = dict(settings)
        for section, fields in self.without_effect.get(stage, {}).items():
            if isinstance(compared.get(section), dict):
                compared[section] = {name: value for name, value in compared[section].items() if name not in fields}
        return compared

    def _write(self, stage: str, settings: Any, *, finished: bool) -> None:
        path = self._path(stage)
        partial = path.with_suffix(f".partial-{os.getpid()}")
        content = json.dumps({"finished": finished, "settings": settings}, indent=1) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(content, encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise DraftsmithError(
                f"the run directory {self.run} cannot be written ({error}); choose another (run=DIR), or make room"
            ) from error

    def _changed(self, stage: str, before: Any, now: Any) -> str:
        changes = "\n".join(f"  {name}: {old} then, {new} now" for name, old, new in differences(before, now))
        return (
            f"{self.run} holds the stage `{stage}` made with other settings:\n{changes}\n"
            f"choose another directory (run=DIR), or pass --fresh to remove that stage's output and make it anew"
        )
