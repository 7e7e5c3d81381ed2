"""Reading a target's model and tokenizer from where they lie."""

from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.errors import DraftsmithError
from draftsmith.targets.location import Location, read_config


def load_model(
    location: Location,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    revision: str | None,
    trust_remote_code: bool,
) -> Any:
    """The causal language model at a location, with all of its weights, read from safetensors; dtype None: the
    checkpoint's.

    Raises `DraftsmithError` for something that is not a causal LM, or weights that are missing or do not fit.
    """
    config = read_config(location, revision, trust_remote_code)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location.name,
            dtype=dtype or "auto",
            device_map={"": device},
            use_safetensors=True,
            output_loading_info=True,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise DraftsmithError(
            f"cannot load target {location.source!r} ({config.model_type}) as a causal language model: {error}"
        ) from error
    model, info = loaded
    _check_all_loaded(location, info)
    return model


def load_tokenizer(location: Location, *, revision: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer beside a target; None for a local directory that has none."""
    if not location.has_tokenizer:
        return None
    return AutoTokenizer.from_pretrained(location.name, revision=revision, trust_remote_code=trust_remote_code)


def _check_all_loaded(location: Location, info: dict[str, Any]) -> None:
    """A weight that the checkpoint lacks would stay random, with no more than a warning from transformers."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise DraftsmithError(
            f"the weights of target {location.source} lack {len(missing)} tensors, such as {', '.join(missing[:5])}; "
            "the checkpoint is incomplete or its configuration is another model's"
        )
