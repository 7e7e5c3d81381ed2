"""Where a target lies: paths as users write them, and what is read from there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from draftsmith.base.paths import user_path
from draftsmith.errors import DraftsmithError
from draftsmith.targets.gguf import converted

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


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
    """The configuration at a location. Raises `DraftsmithError` if there is none or transformers does not know it."""
    try:
        return AutoConfig.from_pretrained(location.name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise DraftsmithError(
            f"cannot read the configuration of target {location.source!r}, looked for "
            f"{'on the hub' if location.directory is None else 'in that directory'}: {error}"
        ) from error


def empty_model(config: PretrainedConfig, trust_remote_code: bool) -> Any:
    """The causal language model of a configuration without its weights: modules on the meta device, to be looked at."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
