"""Feature files of other projects, one document a file: what they hold, and under which names.

SpecForge: torch files `data_I.ckpt` or `.ckpt.gz` below `rows_A-B/`. Model-Optimizer: torch files `ID.pt`. speculators:
`hs_I.safetensors`. None says of which target and which layers its features are; whoever imports them has to.
"""

import gzip
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class ForeignDocument:
    """One document as a file holds it.

    input_ids [S] int64; loss_mask [S] bool, None where files have none; taps [S, T*H] and final_state [S, H] in any
    float dtype (final_state None where files have none); pre_norm: whether the file says that its final state is the
    one before the final norm, None where it does not say.
    """

    sample_id: str
    input_ids: Tensor
    loss_mask: Tensor | None
    taps: Tensor
    final_state: Tensor | None
    pre_norm: bool | None = None


@dataclass(frozen=True)
class ForeignFormat:
    """The files of one project: patterns that find them, and what reads one."""

    patterns: tuple[str, ...]
    read: Callable[[Path], ForeignDocument]

    def files(self, directory: Path) -> list[Path]:
        """All feature files below `directory`, in a fixed order. Raises `DraftsmithError` where there are none."""
        found = sorted(path for pattern in self.patterns for path in directory.rglob(pattern))
        if not found:
            raise DraftsmithError(
                f"{directory} holds no files {' or '.join(self.patterns)}; name another --import or --from"
            )
        return found


def _specforge(path: Path) -> ForeignDocument:
    data = _torch_file(path)
    final: Tensor | None
    if "aux_hidden_state" in data:  # prepared for EAGLE-3
        taps, final = _tensor(path, data, "aux_hidden_state"), _tensor(path, data, "hidden_state")
    else:
        taps = _tensor(path, data, "hidden_states")
        final = _tensor(path, data, "target_last_hidden_states") if "target_last_hidden_states" in data else None
    return ForeignDocument(
        path.name.split(".")[0],
        _ids(path, data, "input_ids"),
        _mask(path, data),
        _rows(path, taps),
        None if final is None else _rows(path, final),
    )


def _modelopt(path: Path) -> ForeignDocument:
    data = _torch_file(path)
    pre_norm = data.get("hidden_states_prenorm")
    return ForeignDocument(
        str(data.get("conversation_id", path.stem)),
        _ids(path, data, "input_ids"),
        _mask(path, data) if "loss_mask" in data else None,
        _rows(path, _tensor(path, data, "aux_hidden_states")),
        _rows(path, _tensor(path, data, "hidden_states")),
        None if pre_norm is None else bool(pre_norm),
    )


def _speculators(path: Path) -> ForeignDocument:
    try:
        data = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    states = _tensor(path, data, "hidden_states")
    if states.dim() != 3 or states.shape[1] < 2:
        raise DraftsmithError(f"{path}: hidden_states are {list(states.shape)}; [S, taps + 1, H] is expected")
    return ForeignDocument(
        path.stem, _ids(path, data, "token_ids"), None, states[:, :-1].flatten(1), states[:, -1], pre_norm=True
    )


FORMATS: dict[str, ForeignFormat] = {
    "specforge": ForeignFormat(("data_*.ckpt", "data_*.ckpt.gz"), _specforge),
    "modelopt": ForeignFormat(("*.pt",), _modelopt),
    "speculators": ForeignFormat(("hs_*.safetensors",), _speculators),
}


def _torch_file(path: Path) -> dict[str, Any]:
    """A dictionary of tensors and plain values; nothing that could run code is unpickled."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = torch.load(cast(IO[bytes], file), map_location="cpu", weights_only=True)
        else:
            data = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, zlib.error) as error:
        raise _damaged(path, error) from error
    if not isinstance(data, dict):
        raise DraftsmithError(f"{path} holds a {type(data).__name__}; a dictionary of tensors is expected")
    return data


def _damaged(path: Path, error: Exception) -> DraftsmithError:
    return DraftsmithError(
        f"{path} cannot be read as tensors ({type(error).__name__}: {error}); it is damaged, or holds objects that "
        "would run code: leave it out, or make it anew"
    )


def _tensor(path: Path, data: dict[str, Any], name: str) -> Tensor:
    value = data.get(name)
    if not isinstance(value, Tensor):
        raise DraftsmithError(
            f"{path} has no tensor {name!r}, but {', '.join(map(repr, sorted(map(str, data))))}; is --from right?"
        )
    return value


def _ids(path: Path, data: dict[str, Any], name: str) -> Tensor:
    ids = _tensor(path, data, name).flatten()
    if ids.is_floating_point():
        raise DraftsmithError(f"{path}: {name} are {ids.dtype}; token ids are integers")
    return ids.to(torch.int64)


def _mask(path: Path, data: dict[str, Any]) -> Tensor:
    mask = _tensor(path, data, "loss_mask").flatten()
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise DraftsmithError(f"{path}: loss_mask holds values other than 0 and 1")
    return mask.to(torch.bool)


def _rows(path: Path, states: Tensor) -> Tensor:
    """[S, width], of that or of [1, S, width]."""
    if states.dim() == 3 and states.shape[0] == 1:
        states = states[0]
    if states.dim() != 2 or not states.is_floating_point():
        raise DraftsmithError(
            f"{path} holds features of {states.dtype} {list(states.shape)}; [S, width] floats are expected"
        )
    return states
