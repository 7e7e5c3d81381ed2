"""The typed choice of position weights, and the loss that they and the cross-entropies of a batch make."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from torch import Tensor

from draftsmith.algorithms.algorithm import Options
from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.weights import (
    continuation_value_weights,
    cumulative_confidence_weights,
    decay_weights,
    dpace_weights,
    uniform_weights,
)


class UniformWeighting(Options):
    """Every supervised label counts the same. Divided by the number of labels."""

    kind: Literal["uniform"] = "uniform"

    def weights(self, blocks: Blocks) -> Tensor:
        """[R, N, P] float32."""
        return uniform_weights(blocks.label_mask)

    def weighted(self, losses: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        weights = self.weights(blocks)
        return (weights * losses).sum(), weights.sum()


class DecayWeighting(Options):
    """Later labels count less: exp(-(k - k0) / gamma). Divided by the sum of the weights."""

    kind: Literal["decay"] = "decay"
    gamma: float = Field(default=7.0, gt=0, allow_inf_nan=False)

    def weights(self, blocks: Blocks) -> Tensor:
        """[R, N, P] float32."""
        return decay_weights(blocks.label_mask, blocks.first_label, self.gamma)

    def weighted(self, losses: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        weights = self.weights(blocks)
        return (weights * losses).sum(), weights.sum()


class DPaceWeighting(Options):
    """D-PACE (arXiv 2605.18810): labels count by what the accept length stands to win from them, as the draft is now.

    Divided by the number of blocks that have a supervised label. `alpha` smooths the confidences towards 1.
    """

    kind: Literal["dpace"] = "dpace"
    alpha: float = Field(default=0.5, gt=0, le=1)
    variant: Literal["full", "cumulative_confidence", "continuation_value"] = "full"

    def weighted(self, losses: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        weigh = {
            "full": dpace_weights,
            "cumulative_confidence": cumulative_confidence_weights,
            "continuation_value": continuation_value_weights,
        }[self.variant]
        weights = weigh(losses, blocks.label_mask, self.alpha)
        return (weights * losses).sum(), blocks.label_mask.any(-1).sum().to(losses.dtype)


# `weighting.weighted(losses [R, N, P], blocks) -> (numerator, denominator)`, differentiable in the losses.
Weighting = Annotated[UniformWeighting | DecayWeighting | DPaceWeighting, Field(discriminator="kind")]


def _refuse_dpace(weighting: Any) -> Any:
    kind = weighting.get("kind") if isinstance(weighting, dict) else getattr(weighting, "kind", None)
    if kind == "dpace":
        raise ValueError(
            "weighting is of kind 'dpace', which follows from the losses of plain cross-entropy; this objective has "
            "other terms and needs its weights before any loss is known: allowed are 'uniform' and 'decay'"
        )
    return weighting


# Weights that are known before the losses, for objectives with more terms than one cross-entropy.
FixedWeighting = Annotated[
    Annotated[UniformWeighting | DecayWeighting, Field(discriminator="kind")], BeforeValidator(_refuse_dpace)
]
