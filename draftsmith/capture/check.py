"""Whether an engine's features are those of the target: the first documents are computed by transformers too."""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from draftsmith.capture.backend import CaptureBackend
from draftsmith.data.sample import Sample
from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import FINAL_STATE, TAPS, CaptureLayout

_log = logging.getLogger(__name__)

CHECKED_TOKENS = 128
"""The most tokens of one document that are compared: attention is causal, so a beginning stands for itself."""

# Median over tokens of a state's distance from the target's, as a share of the target's length. Two engines in float32
# differ by some 1e-6; in 16 bits by 0.5 to 2 %, as far as either is from float32.
LARGEST_DIFFERENCE = {torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}

Reference = Callable[[CaptureLayout], CaptureBackend]


def check_engine(
    engine: CaptureBackend, reference: Reference, layout: CaptureLayout, num_layers: int, samples: Sequence[Sample]
) -> None:
    """Raise `DraftsmithError` where the engine's features of the samples' beginnings are not the target's.

    `reference` makes a backend of the target itself for a layout. Each tap must be close to the target's and closer to
    it than to the layers beside it, which is how an engine that counts layers otherwise shows itself.
    """
    if not samples:
        return
    cut = [_beginning(sample) for sample in samples]
    found = _joined(engine.features(cut))
    beside = {tap_id + step for tap_id in layout.tap_ids for step in (-1, 0, 1)} & set(range(num_layers))
    wide = CaptureLayout(tuple(sorted(beside)), layout.hidden_size, layout.final_state, layout.dtype)
    wanted = _joined(reference(wide).features(cut))
    theirs = dict(zip(wide.tap_ids, wanted[TAPS].unflatten(-1, (-1, layout.hidden_size)).unbind(1), strict=True))
    ours = dict(zip(layout.tap_ids, found[TAPS].unflatten(-1, (-1, layout.hidden_size)).unbind(1), strict=True))
    worst = 0.0
    for tap_id, states in ours.items():
        distances = {layer: _distance(states, theirs[layer]) for layer in theirs if abs(layer - tap_id) <= 1}
        nearest = min(distances, key=distances.__getitem__)
        if nearest != tap_id:
            raise DraftsmithError(
                f"what the engine gives as layer {tap_id} is layer {nearest} of the target (they differ by "
                f"{distances[nearest]:.2%}; from layer {tap_id} it differs by {distances[tap_id]:.2%}): {_FIX}"
            )
        worst = max(worst, distances[tap_id])
        _check(f"layer {tap_id}", distances[tap_id], states)
    if layout.final_state:
        difference = _distance(found[FINAL_STATE], wanted[FINAL_STATE])
        worst = max(worst, difference)
        _check("the final state", difference, found[FINAL_STATE])
    _log.info("capture: the engine's features are the target's on %d documents (within %.2g)", len(cut), worst)


_FIX = (
    "see that the engine runs the recipe's target, with the layers and the dtype that draftsmith asked for, or look no "
    "further with capture.check_samples=0"
)


def _check(what: str, difference: float, states: Tensor) -> None:
    allowed = LARGEST_DIFFERENCE.get(states.dtype, max(LARGEST_DIFFERENCE.values()))
    if not difference <= allowed:
        raise DraftsmithError(
            f"{what} as the engine gives it differs from the target's by {difference:.2%} (allowed in "
            f"{str(states.dtype).removeprefix('torch.')}: {allowed:.0%}): {_FIX}"
        )


def _beginning(sample: Sample) -> Sample:
    return Sample(sample.id, sample.input_ids[:CHECKED_TOKENS], sample.loss_mask[:CHECKED_TOKENS])


def _joined(features: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All tokens end to end, on the CPU, in the dtype they came in."""
    return {name: torch.cat([one[name].detach().cpu() for one in features]) for name in features[0]}


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Median over tokens of |found - wanted| / |wanted|, both [N, H]."""
    found, wanted = found.float(), wanted.float()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())
