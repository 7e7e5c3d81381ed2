"""Single tensors out of a model's safetensors files, sharded or not, local or on the hub."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from draftsmith.errors import DraftsmithError
from draftsmith.targets.location import Location

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorFiles:
    """The tensors of a model by name; opens, and on the hub downloads, only the files that hold what is read."""

    def __init__(self, location: Location, revision: str | None) -> None:
        self._location = location
        self._revision = revision
        index = self._find(_INDEX)
        if index is not None:
            self._file_of = _weight_map(index)
            return
        single = self._find(_SINGLE)
        if single is None:
            raise DraftsmithError(
                f"target {location.source} has neither {_SINGLE} nor {_INDEX}; draftsmith reads safetensors only "
                "(convert other weights with transformers' save_pretrained)"
            )
        with _open(single) as tensors:
            self._file_of = dict.fromkeys(tensors.keys(), _SINGLE)

    def _find(self, name: str) -> Path | None:
        """A file of the model on this machine, or None if the model has no such file."""
        if self._location.directory is not None:
            path = self._location.directory / name
            return path if path.is_file() else None
        try:
            found = cached_file(
                self._location.name, name, revision=self._revision, _raise_exceptions_for_missing_entries=False
            )
        except OSError as error:
            raise DraftsmithError(f"cannot fetch {name} of target {self._location.source!r}: {error}") from error
        return None if found is None else Path(found)

    def _matches(self, ending: str) -> list[str]:
        return [name for name in self._file_of if name == ending or name.endswith(f".{ending}")]

    def has(self, ending: str) -> bool:
        """Whether a tensor's dotted name ends with `ending`."""
        return bool(self._matches(ending))

    def read_one(self, ending: str) -> Tensor | None:
        """The one tensor whose dotted name ends with `ending`, on the CPU; None if there is none. Raises
        `DraftsmithError` if there are several, or its file is missing or damaged."""
        names = self._matches(ending)
        if not names:
            return None
        if len(names) > 1:
            raise DraftsmithError(
                f"target {self._location.source} has several tensors named {ending}: {', '.join(sorted(names))}; "
                "draftsmith cannot tell which is the language model's"
            )
        file = self._find(self._file_of[names[0]])
        if file is None:
            raise DraftsmithError(
                f"target {self._location.source} lacks {self._file_of[names[0]]}, where its index places {names[0]}"
            )
        with _open(file) as tensors:
            return tensors.get_tensor(names[0])


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file, as the index of a sharded model says."""
    try:
        found: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise DraftsmithError(f"{index} has no readable weight_map ({error!r}); fetch or copy it again") from error
    return found


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise DraftsmithError(f"{path} is not a complete safetensors file: {error}; fetch or copy it again") from error
