"""Starting a run from an exported draft (`draft.init_from`)."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafts.backbone import is_added
from draftsmith.drafts.checks import DraftConfigError
from draftsmith.drafts.config import FIELDS, DraftConfig
from draftsmith.drafts.directory import read_draft
from draftsmith.drafts.draft import Draft, all_finite, file_name
from draftsmith.drafts.fields import Warm
from draftsmith.errors import DraftsmithError
from draftsmith.layouts import LayoutError

_log = logging.getLogger(__name__)

# Fields whose values may differ without a tensor that does not fit, and what that does to the loaded weights.
_DEGRADES = {name: field.note.warm for name, field in FIELDS.items() if isinstance(field.note.warm, str)}
# Fields that say how a draft is used, not what its weights have learnt.
_FREE = tuple(name for name, field in FIELDS.items() if field.note.warm is Warm.FREE)


@dataclass(frozen=True)
class Fit:
    """How a checkpoint's tensors meet a draft's, by canonical (z-lab) name: those that are loaded, those that start
    fresh, and one line for each that does not fit (name, found, wanted)."""

    loaded: tuple[str, ...]
    fresh: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def fresh_modules(self) -> tuple[str, ...]:
        """The modules that start fresh."""
        return tuple(sorted({name.rpartition(".")[0] or name for name in self.fresh}))


@dataclass(frozen=True)
class WarmStart:
    """The draft at `source`: its configuration, its tensors by canonical (z-lab) name, the layout it was read as, and
    what reading it had to say."""

    source: str
    layout: str
    config: DraftConfig
    tensors: dict[str, Tensor]
    remarks: tuple[str, ...] = ()

    def fit(self, config: DraftConfig) -> Fit:
        """Compares with the draft of this configuration, which is not allocated."""
        with torch.device("meta"):
            return self._fit(config, Draft(config).state_dict())

    def differences(self, config: DraftConfig) -> dict[str, tuple[Any, Any]]:
        """The configuration's fields that differ: name -> (the checkpoint's value, this configuration's).

        The head's fields are compared where both have the same kind of head; a head that only one of them has shows in
        the tensors.
        """
        there, here = self.config.flat(), config.flat()
        return {
            name: (there[name], here[name])
            for name in (*_DEGRADES, *_FREE)
            if there[name] != here[name] and (name != "head" or self.config.architecture == config.architecture)
        }

    def warnings(self, config: DraftConfig, fit: Fit) -> list[str]:
        """What is allowed and should be known: remarks on the files, differences that the weights were not trained for,
        and modules that start fresh."""
        lines = [f"{self.source}: {remark}" for remark in self.remarks]
        lines += [
            f"{self.source}: {name} is {shown(found)}, this run has {shown(wanted)}; {_DEGRADES[name]}"
            for name, (found, wanted) in self.differences(config).items()
            if name not in _FREE
        ]
        if modules := fit.fresh_modules:
            lines.append(f"{self.source} lacks {', '.join(modules)}; they start with fresh weights")
        return lines

    def check(self, config: DraftConfig) -> Fit:
        """The fit; raises `DraftsmithError` listing every tensor that does not fit the draft of this configuration."""
        fit = self.fit(config)
        self._refuse(fit)
        return fit

    def load_into(self, draft: Draft) -> None:
        """Copy the tensors into `draft`.

        Every tensor must fit, with one exception: a head (or the convolutions) that the checkpoint lacks altogether
        keeps its fresh weights. Logs `warnings`. Raises `DraftsmithError` listing every mismatch.
        """
        state = draft.state_dict()
        fit = self._fit(draft.config, state)
        self._refuse(fit)
        for line in self.warnings(draft.config, fit):
            _log.warning("%s", line)
        parameters = {file_name(name): parameter for name, parameter in state.items()}
        with torch.no_grad():
            for name in fit.loaded:
                parameters[name].copy_(self.tensors[name])

    def _fit(self, config: DraftConfig, state: Mapping[str, Tensor]) -> Fit:
        wanted = {file_name(name): (name, tensor) for name, tensor in state.items()}
        added = {canonical for canonical, (name, _) in wanted.items() if is_added(name)}
        partial = bool(added & self.tensors.keys())
        fresh = set() if partial else added
        faults = []
        for name, (_, parameter) in wanted.items():
            if name not in self.tensors and name not in fresh:
                where = "the checkpoint, which has other parts of this head" if name in added else "the checkpoint"
                faults.append(f"{name}: not in {where}, wanted {list(parameter.shape)}")
        for name, tensor in self.tensors.items():
            if name not in wanted:
                faults.append(f"{name}: found {list(tensor.shape)}, not part of the configured draft")
            elif tensor.shape != wanted[name][1].shape:
                faults.append(f"{name}: found {list(tensor.shape)}, wanted {list(wanted[name][1].shape)}")
            elif tensor.is_floating_point() != wanted[name][1].is_floating_point():
                kind = "floating-point numbers" if wanted[name][1].is_floating_point() else "integers"
                faults.append(f"{name}: found {tensor.dtype}, wanted {kind}")
            elif tensor.is_floating_point() and not all_finite(tensor):
                faults.append(f"{name}: found NaN or Inf, wanted finite numbers")
        faults.sort()
        if self.config.hidden_size != config.hidden_size:
            faults.insert(0, f"hidden_size: found {self.config.hidden_size}, wanted the target's {config.hidden_size}")
        loaded = tuple(name for name in wanted if name in self.tensors)
        return Fit(loaded, tuple(name for name in wanted if name in fresh), tuple(faults))

    def _refuse(self, fit: Fit) -> None:
        if fit.faults:
            raise DraftsmithError(
                f"draft.init_from {self.source} does not fit the configured draft; change the recipe's sizes, or leave "
                "them out to take the checkpoint's:\n" + "\n".join(f"  {fault}" for fault in fit.faults)
            )


def read_warm_start(directory: str) -> WarmStart:
    """Read an exported draft of any readable layout.

    Raises `DraftsmithError` naming the path where there is no directory or no weights, and for files that are damaged
    or contradict themselves.
    """
    path = Path(directory)
    if not path.is_dir():
        raise DraftsmithError(
            f"draft.init_from: there is no directory {path}; it takes one with a draft's config.json and weights"
        )
    try:
        found, config = read_draft(path, strict=True)
    except (LayoutError, DraftConfigError) as error:  # which name the path
        raise DraftsmithError(f"draft.init_from: {error}") from error
    remarks = [*found.notes]
    if found.ignored:
        remarks.append(f"drafts have no {', '.join(found.ignored)}; not loaded")
    return WarmStart(directory, found.layout, config, found.tensors, tuple(remarks))


def shown(value: Any) -> str:
    """A field's value as users write it."""
    if isinstance(value, tuple):
        return str(list(value))
    return str(value.as_parameters()) if hasattr(value, "as_parameters") else str(value)
