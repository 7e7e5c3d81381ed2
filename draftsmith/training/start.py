"""Where a run starts: from a checkpoint of its own, from an exported draft, or from nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.algorithms.build import copied_fields, draft_config
from draftsmith.algorithms.section import DraftSection
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.targets.info import TargetInfo
from draftsmith.training.checkpoint import Checkpoint, RunCheckpoints
from draftsmith.training.record import CHECKPOINTS, RunRecord, read_record
from draftsmith.training.warm_start import WarmStart, read_warm_start, shown


@dataclass(frozen=True)
class Start:
    """The draft's configuration, and what its weights come from: the run checkpoint `latest` (whose run is `record`),
    the exported draft `warm`, or neither. `section` is the recipe's."""

    run_dir: Path
    section: DraftSection
    config: DraftConfig
    latest: Checkpoint | None = None
    record: RunRecord | None = None
    warm: WarmStart | None = None

    def lines(self) -> list[str]:
        """What is loaded, what is fresh and what differs, for people to read before the run starts."""
        if self.latest is not None:
            ignored = f"; draft.init_from ({self.section.init_from}) is not read" if self.section.init_from else ""
            lines = [f"goes on from step {self.latest.position.step:,} of {self.run_dir}{ignored}"]
        elif self.warm is None:
            lines = ["starts from fresh weights (no draft.init_from)"]
        else:
            lines = _warm_lines(self.warm, self.section, self.config)
        return [*lines, f"draft: {_described(self.config)}"]

    def warnings(self) -> list[str]:
        """What the run will warn of when it loads the draft it starts from."""
        return [] if self.warm is None else self.warm.warnings(self.config, self.warm.fit(self.config))

    def check(self, section: dict[str, Any], options: dict[str, Any], store: str | None = None) -> None:
        """Raise `DraftsmithError` where the run could not go on with these settings of the recipe (`draft` and `train`,
        JSON types) or this store's index (None: not compared), or the draft to start from does not fit."""
        if self.record is not None:
            self.record.check_resume(section, options, self.record.store if store is None else store)
        if self.warm is not None:
            self.warm.check(self.config)


def find_start(section: DraftSection, target: TargetInfo, run_dir: Path, *, resume: bool) -> Start:
    """Looks at the run's checkpoints, the recipe's `draft` section and `init_from`, in this order.

    A run that goes on takes its configuration from its own record and reads nothing else. Raises `DraftsmithError` for
    a run that is there and not to be resumed, a draft that cannot be read, and a configuration that cannot be right;
    whether a warm start's tensors fit is not asked here (`WarmStart.check`).
    """
    latest = RunCheckpoints(run_dir / CHECKPOINTS).latest()
    if latest is not None:
        if not resume:
            raise DraftsmithError(
                f"{run_dir} holds a run that has reached step {latest.position.step}; resume it (--resume), or take "
                "another directory"
            )
        record = read_record(run_dir)
        return Start(run_dir, section, DraftConfig.parse(record.draft_config), latest=latest, record=record)
    warm = read_warm_start(section.init_from) if section.init_from is not None else None
    config = draft_config(section, target, warm.config if warm else None)
    return Start(run_dir, section, config, warm=warm)


def _warm_lines(warm: WarmStart, section: DraftSection, config: DraftConfig) -> list[str]:
    fit = warm.fit(config)
    lines = [f"starts from the draft {warm.source} ({warm.config.architecture}, layout {warm.layout})"]
    copied = copied_fields(section, warm.config)
    lines += [f"from the checkpoint: {name} = {shown(value)}" for name, value in copied.items()]
    differences = warm.differences(config)
    lines += [f"different: {name} is {shown(a)} there, {shown(b)} here" for name, (a, b) in differences.items()]
    lines.append(f"loaded: {len(fit.loaded)} of the checkpoint's {len(warm.tensors)} tensors")
    return [*lines, *(f"fresh: {module}" for module in fit.fresh_modules)]


def _described(config: DraftConfig) -> str:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Draft(config).parameters())
    block = config.block
    return ", ".join(
        (
            config.architecture,
            f"{config.num_hidden_layers} layers of width {config.hidden_size}",
            *(() if block is None else (f"blocks of {block.size}",)),
            f"tapped layers {list(config.target_layer_ids)} of {config.num_target_layers}",
            *(() if block is None else (f"mask token {block.mask_token_id}",)),
            f"{parameters:,} parameters",
        )
    )
