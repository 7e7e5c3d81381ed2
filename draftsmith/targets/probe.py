"""A check on a few tokens, at load, that a model is what this package takes it for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import DraftsmithError
from draftsmith.targets.ends import TargetEnds

_PROBE_TOKENS = 5
# The probe repeats the model's own operations on the same values; only a library's choice of kernel may differ.
_TOLERANCE = {torch.float32: 1e-4}
_HALF_TOLERANCE = 2e-2


@torch.no_grad()
def check_model(model: Any, decoder: nn.Module, layers: nn.ModuleList, ends: TargetEnds) -> None:
    """Raise `DraftsmithError` unless a model is what this package takes it for.

    Its layers run once each and read one residual stream, so that a tap means something; `ends` give what the first
    layer reads and the logits that the model returns. That catches every scale, bias or cap on embeddings or logits
    that this package does not know of.
    """
    ids = torch.arange(1, 1 + _PROBE_TOKENS, device=ends.head_weight.device)[None] % ends.vocab_size
    inputs: list[Tensor] = []
    final_states: list[Tensor] = []

    def keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    def keep_output(module: nn.Module, args: Any, output: Any) -> None:
        final_states.append(output.last_hidden_state)

    handles = [layer.register_forward_pre_hook(keep_input, with_kwargs=True) for layer in layers]
    handles.append(decoder.register_forward_hook(keep_output))
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    _check_layers(model, len(layers), inputs, ends.hidden_size)
    if not bool(torch.isfinite(logits).all()):
        raise DraftsmithError(f"{type(model).__name__} gives NaN or infinite logits; check its weights and dtype")
    _compare(model, "embeddings", ends.embed(ids), inputs[0])
    _compare(model, "logits", ends.project(final_states[0]), logits)


def _check_layers(model: Any, count: int, inputs: Sequence[Tensor], hidden_size: int) -> None:
    kind = f"model type {model.config.model_type!r}"
    if len(inputs) != count:
        raise DraftsmithError(
            f"{kind} runs its {count} layers {len(inputs)} times in one forward, so that no "
            "state is the one after a layer; this target is not supported"
        )
    wanted = (1, _PROBE_TOKENS, hidden_size)
    for states in inputs:
        if tuple(states.shape) != wanted:
            raise DraftsmithError(
                f"the layers of {kind} read {list(states.shape)} for {_PROBE_TOKENS} tokens of width {hidden_size}: "
                "several residual streams, of which no tap is defined; this target is not supported"
            )


def _compare(model: Any, what: str, ours: Tensor, theirs: Tensor) -> None:
    difference = (ours.float() - theirs.float()).abs().max()
    tolerance = _TOLERANCE.get(ours.dtype, _HALF_TOLERANCE)
    if not bool(difference <= tolerance * theirs.float().abs().max()):
        raise DraftsmithError(
            f"model type {model.config.model_type!r} computes its {what} in a way draftsmith does not know (a scale, "
            f"bias or cap; difference {float(difference):.3g}); this target is not supported"
        )
