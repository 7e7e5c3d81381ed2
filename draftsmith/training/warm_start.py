"""Starting a run from an exported draft (`draft.init_from`)."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafts.backbone import WRAPPED_SUBLAYERS
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft, file_name
from draftsmith.errors import DraftsmithError
from draftsmith.layouts import read_directory

_log = logging.getLogger(__name__)

_DEGRADES = {
    "mask_token_id": "masked slots read an embedding that the checkpoint was never trained on",
    "target_layer_ids": "the context projection meets the states of other layers than it was trained on",
}


@dataclass(frozen=True)
class WarmStart:
    """The draft at `source`: its configuration, and its tensors by canonical (z-lab) name."""

    source: str
    config: DraftConfig
    tensors: dict[str, Tensor]

    def load_into(self, draft: Draft) -> None:
        """Copy the tensors into `draft`.

        Every tensor must fit, with one exception: a part of the architecture (a head, convolutions) that the checkpoint
        lacks altogether keeps its fresh weights, with a warning that names its modules. `mask_token_id` or
        `target_layer_ids` other than the checkpoint's are a warning. Raises `DraftsmithError` listing every mismatch.
        """
        wanted = {file_name(name): (name, tensor) for name, tensor in draft.state_dict().items()}
        added = {canonical for canonical, (name, _) in wanted.items() if _is_added(name)}
        fresh = added if not added & self.tensors.keys() else set()
        faults = [
            f"{name}: not in the checkpoint, wanted {list(wanted[name][1].shape)}"
            for name in wanted
            if name not in self.tensors and name not in fresh
        ]
        faults += [
            f"{name}: found {list(tensor.shape)}, "
            + (f"wanted {list(wanted[name][1].shape)}" if name in wanted else "not part of the configured draft")
            for name, tensor in self.tensors.items()
            if name not in wanted or tensor.shape != wanted[name][1].shape
        ]
        if faults:
            raise DraftsmithError(
                f"draft.init_from {self.source} does not fit the configured draft:\n" + "\n".join(sorted(faults))
            )
        self._warn(draft.config, fresh)
        with torch.no_grad():
            for canonical, (_, parameter) in wanted.items():
                if canonical not in fresh:
                    parameter.copy_(self.tensors[canonical])

    def _warn(self, config: DraftConfig, fresh: set[str]) -> None:
        for field, consequence in _DEGRADES.items():
            found, wanted = getattr(self.config, field), getattr(config, field)
            if found != wanted:
                _log.warning("%s: %s is %s, this run has %s; %s", self.source, field, found, wanted, consequence)
        if fresh:
            modules = sorted({name.rsplit(".", 1)[0] for name in fresh})
            _log.warning("%s lacks %s; they start with fresh weights", self.source, ", ".join(modules))


def read_warm_start(directory: str) -> WarmStart:
    """Read an exported draft of any readable layout. Raises `DraftsmithError` naming the path where there is none."""
    path = Path(directory)
    if not path.is_dir():
        raise DraftsmithError(
            f"draft.init_from: there is no directory {path}; it takes one with a draft's config.json and weights"
        )
    found = read_directory(path, strict=True)
    for note in found.notes:
        _log.warning("%s: %s", path, note)
    if found.ignored:
        _log.warning("%s: drafts have no %s; not loaded", path, ", ".join(found.ignored))
    return WarmStart(directory, DraftConfig.parse(found.config), found.tensors)


def _is_added(name: str) -> bool:
    """Whether a parameter (by its name in the draft) belongs to what a plain draft does not have."""
    parts = name.split(".")
    return parts[0] == "head" or any(part in WRAPPED_SUBLAYERS for part in parts)
