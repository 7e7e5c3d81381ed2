"""Where a target lies: paths as users write them, and what is read from there.

A configuration is read from here only, so that a checkpoint that would be read wrongly is refused by everyone alike.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import cached_file, is_peft_available

from draftsmith.base.paths import user_path
from draftsmith.errors import DraftsmithError
from draftsmith.targets.gguf import converted
from draftsmith.targets.quantised import MODELOPT_FILE, quantisation_fault

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_ADAPTER_FILE = "adapter_config.json"
_MERGING = (
    "merge it into its model with the package peft "
    "(AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)), and name what that writes"
)


@dataclass(frozen=True)
class Location:
    """A target's files: `source` as the user wrote it, `name` for transformers (a directory or a hub id), and the local
    `directory`, None for a hub id."""

    source: str
    name: str
    directory: Path | None

    @property
    def has_tokenizer(self) -> bool:
        """False for a local directory without tokenizer files; a hub id is taken to have one."""
        return self.directory is None or any((self.directory / name).exists() for name in _TOKENIZER_FILES)

    def file(self, name: str, revision: str | None, *, optional: bool = False) -> Path | None:
        """A file of the model on this machine, downloaded from the hub if need be; None if the model has no such file.

        optional: a hub that cannot be reached has none that was not fetched before. Raises `DraftsmithError` for one
        that cannot be fetched.
        """
        if self.directory is not None:
            path = self.directory / name
            return path if path.is_file() else None
        try:
            found = cached_file(
                self.name,
                name,
                revision=revision,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=not optional,
            )
        except OSError as error:
            raise DraftsmithError(f"cannot fetch {name} of target {self.source!r}: {error}") from error
        return None if found is None else Path(found)


def locate(path: str | Path) -> Location:
    """Find a target by local directory, .gguf file or hub id. A GGUF file is converted on its first use.

    Raises `DraftsmithError` for a path that does not exist or holds no model.
    """
    source = str(path)
    local = user_path(path)
    if local.suffix == ".gguf":
        directory = converted(local)
        return Location(source, str(directory), directory)
    if local.is_dir():
        if not (local / "config.json").is_file():
            if (local / _ADAPTER_FILE).is_file():
                raise DraftsmithError(f"{local} holds an adapter ({_ADAPTER_FILE}) without its model; {_MERGING}")
            raise DraftsmithError(f"{local} has no config.json; a target directory holds a Hugging Face model")
        return Location(source, str(local), local)
    if local.exists():
        raise DraftsmithError(f"{local} is neither a model directory nor a .gguf file")
    if local.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise DraftsmithError(
            f"there is no target at {source}: no such directory, and hub ids look like 'organisation/model'"
        )
    return Location(source, source, None)


def read_config(location: Location, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration at a location.

    Raises `DraftsmithError` if there is none or transformers does not know it, for a checkpoint that transformers would
    load without the scales of its weights, and for an adapter beside a model that nothing here would apply.
    """
    try:
        config = AutoConfig.from_pretrained(location.name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise DraftsmithError(
            f"cannot read the configuration of target {location.source!r}, looked for "
            f"{'on the hub' if location.directory is None else 'in that directory'}: {error}"
        ) from error
    fault = quantisation_fault(config, location.file(MODELOPT_FILE, revision, optional=True) is not None)
    if fault is not None:
        raise DraftsmithError(f"target {location.source} cannot be read: {fault}")
    if not is_peft_available() and location.file(_ADAPTER_FILE, revision, optional=True) is not None:
        raise DraftsmithError(
            f"target {location.source} has an adapter ({_ADAPTER_FILE}) beside its model, which would be left out here "
            f"and be applied where the package peft is installed; {_MERGING}, or install peft"
        )
    return config


def empty_model(config: PretrainedConfig, trust_remote_code: bool) -> Any:
    """The causal language model of a configuration without its weights: modules on the meta device, to be looked at.

    Raises `DraftsmithError` where transformers has none for it.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError) as error:
        raise DraftsmithError(not_causal(config, config.name_or_path, error)) from error


def not_causal(config: PretrainedConfig, source: str, error: Exception) -> str:
    """What to say where transformers gives no causal language model of a configuration."""
    # It goes on with the names of all models that it has.
    said = str(error).split("Model type should be one of")[0].strip()
    return f"cannot load target {source!r} ({config.model_type}) as a causal language model: {said}"
