"""Single tensors out of a model's safetensors files, sharded or not, local or on the hub."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from draftsmith.errors import DraftsmithError
from draftsmith.targets.location import Location
from draftsmith.targets.quantised import dequantised

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SCALES = ("weight_scale", "weight_scale_inv")  # the second is no inverse: both multiply


class TensorFiles:
    """The tensors of a model by the names of its parameters in transformers.

    Opens, and on the hub downloads, only the files that hold what is read. model: the model, with or without weights;
    it tells what its tensors are called in files.
    """

    def __init__(self, location: Location, revision: str | None, model: Any) -> None:
        self._location = location
        self._revision = revision
        self._file_of = stored_files(location, revision)
        self._model = model

    def read(self, parameters: Sequence[str]) -> dict[str, Tensor]:
        """Those of the model's parameters that the files hold, by name, on the CPU.

        8-bit floats beside their scale come multiplied with it, in fp32. Raises `DraftsmithError` where several tensors
        are one parameter, where a tensor is stored in another form than the model's, or beside others that it cannot be
        read without, and where a file is missing or damaged.
        """
        stored = self._stored_names(parameters)
        return {name: self._read(name, stored) for name in parameters if name in stored}

    def _stored_names(self, parameters: Sequence[str]) -> dict[str, str]:
        """Parameter -> the name under which its tensor is stored, as transformers maps the two when it loads."""
        transforms = get_model_conversion_mapping(self._model)
        # As in transformers: all renamings in turn, then the first converter that knows the name.
        transforms.sort(key=lambda transform: isinstance(transform, WeightConverter))
        wanted = set(parameters)
        in_a_layer = any(_layer_index(name) for name in parameters)
        found: dict[str, str] = {}
        for stored in self._file_of:
            if _layer_index(stored) and not in_a_layer:
                continue
            renamed, converted = _renamed(stored, transforms)
            base = f"{self._model.base_model_prefix}."
            name = next((n for n in (renamed, renamed.removeprefix(base), base + renamed) if n in wanted), None)
            if name is None:
                continue
            if converted:
                raise DraftsmithError(
                    f"target {self._location.source} stores {name} in another form ({stored}), which transformers "
                    "converts when it loads the model; draftsmith cannot read it alone"
                )
            if name in found:
                raise DraftsmithError(
                    f"target {self._location.source} has several tensors that are {name}: {found[name]}, {stored}; "
                    "delete those that are not the model's"
                )
            found[name] = stored
        return found

    def _read(self, parameter: str, stored_names: dict[str, str]) -> Tensor:
        stored = stored_names[parameter]
        tensor = self._tensor(stored)
        module = stored.rpartition(".")[0]
        beside = sorted(
            name for name in self._file_of if name.startswith(f"{module}.") and name not in stored_names.values()
        )
        if not beside and tensor.is_floating_point() and tensor.element_size() > 1:
            return tensor
        if tensor.is_floating_point() and tensor.element_size() == 1 and len(beside) == 1:
            is_scale = beside[0].removeprefix(f"{module}.") in _SCALES
            scaled = dequantised(tensor, self._tensor(beside[0])) if is_scale else None
            if scaled is not None:
                return scaled
        others = f"beside {', '.join(beside)}" if beside else "without a scale"
        raise DraftsmithError(
            f"target {self._location.source} stores {parameter} as {tensor.dtype} {list(tensor.shape)} {others}, and "
            "draftsmith reads 16- and 32-bit floats that lie alone, or 8-bit floats with one scale for all, one a row "
            "or one a block; use a checkpoint whose embedding, norms and output head are not quantised"
        )

    def _tensor(self, stored: str) -> Tensor:
        name = self._file_of[stored]
        file = self._location.file(name, self._revision)
        if file is None:
            raise DraftsmithError(f"target {self._location.source} lacks {name}, where its index places {stored}")
        with open_tensors(file) as tensors:
            return tensors.get_tensor(stored)


def stored_files(location: Location, revision: str | None) -> dict[str, str]:
    """Stored name -> file, of all tensors of a model. Raises `DraftsmithError` for one without safetensors."""
    index = location.file(_INDEX, revision)
    if index is not None:
        return _weight_map(index)
    single = location.file(_SINGLE, revision)
    if single is None:
        raise DraftsmithError(
            f"target {location.source} has neither {_SINGLE} nor {_INDEX}; draftsmith reads safetensors only "
            "(convert other weights with transformers' save_pretrained)"
        )
    with open_tensors(single) as tensors:
        return dict.fromkeys(tensors.keys(), _SINGLE)


def _renamed(stored: str, transforms: Sequence[Any]) -> tuple[str, bool]:
    """(the model's name of a stored tensor but for the prefix of its base model, whether its values are converted)."""
    name = stored
    for transform in transforms:
        name, pattern = transform.rename_source_key(name)
        if pattern is not None and isinstance(transform, WeightConverter):
            return name, True
    return name, False


def _layer_index(name: str) -> bool:
    """Whether this is the name of something in a numbered module."""
    return any(part.isdigit() for part in name.split("."))


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file, as the index of a sharded model says."""
    try:
        found: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise DraftsmithError(f"{index} has no readable weight_map ({error!r}); fetch or copy it again") from error
    return found


def open_tensors(path: Path) -> safe_open:
    """A safetensors file, to be closed. Raises `DraftsmithError` for one that is damaged or missing."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise DraftsmithError(f"{path} is not a complete safetensors file: {error}; fetch or copy it again") from error
    except OSError as error:
        raise DraftsmithError(f"{path} cannot be read: {error}; fetch or copy it again") from error
