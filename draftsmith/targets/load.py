"""Reading a target's model and tokenizer from where they lie."""

from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.errors import DraftsmithError
from draftsmith.targets.location import Location, not_causal, read_config
from draftsmith.targets.quantised import left_unread


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

    Raises `DraftsmithError` for something that is not a causal LM, weights that are missing or do not fit, and weights
    that are not read as their checkpoint means them.
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
        raise DraftsmithError(not_causal(config, location.source, error)) from error
    model, info = loaded
    _check_all_loaded(model, location, info)
    return model


def load_tokenizer(location: Location, *, revision: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer beside a target; None for a local directory that has none."""
    if not location.has_tokenizer:
        return None
    return AutoTokenizer.from_pretrained(location.name, revision=revision, trust_remote_code=trust_remote_code)


def _check_all_loaded(model: Any, location: Location, info: dict[str, Any]) -> None:
    """Raise `DraftsmithError` unless a model has all its weights from its checkpoint, as they are meant there.

    info: what `from_pretrained` says about the loading. A weight that the checkpoint lacks would stay random, and one
    whose scale was not read would be another, with no more than a warning from transformers.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise DraftsmithError(
            f"the weights of target {location.source} lack {len(missing)} tensors, such as {', '.join(missing[:5])}; "
            "the checkpoint is incomplete or its configuration is another model's"
        )
    unread = left_unread(model, info["unexpected_keys"])
    if unread:
        raise DraftsmithError(
            f"transformers loaded target {location.source} without {len(unread)} tensors that its weights lie beside, "
            f"such as {', '.join(unread[:5])}, so that it is not the model of its checkpoint: quantised in a way that "
            "transformers does not know, or with a configuration of another model"
        )
