"""Draft directories as files: safetensors and JSON in, and atomically out."""

import json
import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.layouts.canonical import LayoutError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SPECFORGE_STATE = "training_state.pt"
MASK_EMBEDDING = "mask_embedding.pt"
_UNSAFE = (".bin", ".pt", ".pth", ".ckpt")
_LARGEST_JSON = 64 * 1024**2
_DEEPEST_JSON = 32
_MOST_TENSORS = 20_000


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `LayoutError` when it is missing, not JSON, not an object, or nothing that a writer of
    drafts writes: too large, or nested too deeply."""
    check_regular(path)
    try:
        if (size := path.stat().st_size) > _LARGEST_JSON:
            raise LayoutError(f"{path} has {size:,} bytes; allowed: up to {_LARGEST_JSON:,}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LayoutError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, or of an integer with thousands of digits
        raise LayoutError(f"{path} is not valid JSON ({error}); write or download it again") from None
    if not isinstance(content, dict):
        raise LayoutError(f"{path} holds a JSON {type(content).__name__}; allowed: an object")
    if _depth(content) > _DEEPEST_JSON:
        raise LayoutError(f"{path} is nested more than {_DEEPEST_JSON} levels deep; write or download it again")
    return content


def _depth(content: Any) -> int:
    """Levels of objects and lists."""
    level, depth = [content], 0
    while level:
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [inner for value in containers for inner in (value.values() if isinstance(value, dict) else value)]
        depth += bool(containers)
    return depth


def check_regular(path: Path) -> None:
    """`LayoutError` for what is no regular file (links are followed): reading a pipe or a device may never end."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise LayoutError(f"{path} does not exist; a draft directory holds {CONFIG} and {WEIGHTS}") from None
    except OSError as error:
        raise LayoutError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    if not stat.S_ISREG(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "pipe" if stat.S_ISFIFO(mode) else "device or socket"
        raise LayoutError(f"{path} is a {kind}; allowed: a regular file")


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a draft directory."""
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise LayoutError(f"{directory} {what}; a draft is a local directory with {CONFIG} and {WEIGHTS}")
    return read_json(directory / CONFIG)


def read_tensors(directory: Path, allow_pickle: bool = False) -> dict[str, Tensor]:
    """All tensors of a directory with `model.safetensors` or with shards and their index, on the CPU.

    allow_pickle: a single .pt, .pth, .bin or .ckpt file is read where there are no safetensors.
    """
    if (directory / MASK_EMBEDDING).exists():
        raise LayoutError(
            f"{directory} holds {MASK_EMBEDDING}, a mask token's embedding of its own; drafts here take the target's, "
            "and would run as another draft without it"
        )
    single, index = directory / WEIGHTS, directory / INDEX
    if single.exists() and index.exists():
        raise LayoutError(f"{directory} holds both {WEIGHTS} and {INDEX}; remove the one that is out of date")
    if index.exists():
        return _read_sharded(directory, index)
    if single.exists():
        return _read_file(single)
    pickled = sorted(path for path in directory.iterdir() if path.suffix in _UNSAFE)
    named = ", ".join(path.name for path in pickled)
    if pickled and allow_pickle:
        if len(pickled) > 1:
            raise LayoutError(f"{directory} holds {named}; leave the one file that has the draft's weights")
        return _read_pickled(pickled[0])
    hint = (
        f"; {named} may run code when loaded: convert to safetensors first, or allow pickles (convert --allow-pickle)"
        if pickled
        else ""
    )
    raise LayoutError(f"{directory} holds no weights: neither {WEIGHTS} nor {INDEX} is there{hint}")


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled state dict, or of the draft in SpecForge's training state; nothing but tensors and plain
    containers is unpickled."""
    check_regular(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise LayoutError(
            f"{path} holds more than tensors, or is damaged ({reason}); have its writer export safetensors"
        ) from None
    if isinstance(content, dict) and isinstance(content.get("draft_state_dict"), dict):
        content = content["draft_state_dict"]
    if not isinstance(content, dict) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise LayoutError(
            f"{path} holds no state dict; allowed: names and tensors, by themselves or as draft_state_dict"
        )
    return {str(name): tensor.contiguous() for name, tensor in content.items()}


def _read_sharded(directory: Path, index: Path) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LayoutError(f"{index}: weight_map is {weight_map!r}; allowed: an object of tensor name -> file name")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file:
            raise LayoutError(f"{index}: {name} is in {file!r}; allowed: the name of a file in the same directory")
        if not file.endswith(".safetensors"):
            raise LayoutError(f"{index}: {name} is in {file!r}; only .safetensors files are read")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        if not (directory / file).exists():
            raise LayoutError(f"{directory / file} does not exist, but {index} names it; copy or download it again")
        shard = _read_file(directory / file)
        listed = {name for name, owner in weight_map.items() if owner == file}
        if listed != set(shard):
            raise LayoutError(
                f"{directory / file} and {index} disagree: only in the index {sorted(listed - set(shard))}, "
                f"only in the file {sorted(set(shard) - listed)}"
            )
        tensors.update(shard)
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    check_regular(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            if len(names) > _MOST_TENSORS:
                raise LayoutError(f"{path} holds {len(names):,} tensors; allowed: up to {_MOST_TENSORS:,}")
            return {name: file.get_tensor(name) for name in names}
    except OSError as error:
        raise LayoutError(f"{path} cannot be read ({error}); check its permissions") from None
    except SafetensorError as error:
        raise LayoutError(f"{path} is damaged or not a safetensors file ({error}); copy or download it again") from None


def write(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    extra_files: Mapping[str, str | bytes],
    check: Callable[[Path], object] | None = None,
) -> None:
    """Writes a draft directory whole or not at all. check: looks at what is written before it counts, and raises where
    it must not take its place.

    Everything goes to a temporary directory beside it, which then takes its place; a draft that was there before stays
    until then, and comes back if the last step fails. A directory that holds anything but a draft is not touched.
    """
    directory = directory.resolve()
    for name in extra_files:
        if Path(name).name != name or name in (CONFIG, WEIGHTS, INDEX):
            raise LayoutError(f"extra file {name!r}; allowed: a plain file name other than {CONFIG} and the weights")
    refuse_overwriting(directory, extra_files)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.writing-"))
    except OSError as error:
        raise LayoutError(f"cannot write into {directory.parent} ({error}); give a directory elsewhere") from error
    try:
        _fill(staging, config, tensors, extra_files, directory)
        if check is not None:
            check(staging)
        _take_place(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fill(
    staging: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    extra_files: Mapping[str, str | bytes],
    directory: Path,
) -> None:
    try:
        staging.chmod(0o777 & ~_umask())
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staging / WEIGHTS, {"format": "pt"})
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, content in extra_files.items():
            (staging / name).write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    except (OSError, SafetensorError) as error:  # a full disk, say
        raise LayoutError(
            f"the draft cannot be written to {directory} ({error}), which is as it was before; make room, or give a "
            "directory elsewhere"
        ) from error


def refuse_overwriting(directory: Path, extra_files: Mapping[str, Any]) -> None:
    """`LayoutError` unless `directory` is missing, empty, or a draft directory and nothing else."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise LayoutError(f"{directory} is a file; give a directory to write the draft into")
    present = {path.name for path in directory.iterdir()}
    if not present:
        return
    known = {CONFIG, WEIGHTS, INDEX, *extra_files}
    others = sorted(name for name in present if name not in known and not name.endswith(".safetensors"))
    if others or CONFIG not in present:
        found = ", ".join(others or sorted(present))
        raise LayoutError(f"{directory} is not only a draft directory (it holds {found}); give a new or empty one")


def _take_place(staging: Path, directory: Path) -> None:
    if not directory.exists():
        os.replace(staging, directory)
        return
    previous = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.previous-"))
    os.replace(directory, previous)  # onto an empty directory
    try:
        os.replace(staging, directory)
    except OSError:
        os.replace(previous, directory)
        raise
    shutil.rmtree(previous)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
