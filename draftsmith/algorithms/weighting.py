"""The typed choice of position weights, and the loss that they and the cross-entropies of a batch make."""

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from torch import Tensor

from draftsmith.algorithms.options import Options
from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.weights import (
    continuation_value_weights,
    cumulative_confidence_weights,
    decay_weights,
    dpace_weights,
    uniform_weights,
)


class _Weighting(Options):
    """Position weights w of labels, and the divisor of sum(w * loss). Weights carry no gradient."""

    @abstractmethod
    def label_weights(self, losses: Tensor, label_mask: Tensor, first_label: Tensor) -> Tensor:
        """losses and label_mask [..., P] of whole blocks, first_label [...] -> [..., P] float32, 0 where not
        supervised. Blocks do not influence each other."""

    @abstractmethod
    def denominator(self, blocks: Blocks) -> Tensor:
        """Scalar float32."""

    def weighted(self, losses: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """losses [R, N, P] -> (numerator, denominator), the numerator differentiable in the losses."""
        weights = self.label_weights(losses, blocks.label_mask, blocks.first_label)
        return (weights * losses).sum(), self.denominator(blocks)


class _FixedWeighting(_Weighting):
    """Weights that do not depend on the losses. Divided by their sum."""

    @abstractmethod
    def weights(self, blocks: Blocks) -> Tensor:
        """[R, N, P] float32."""

    def denominator(self, blocks: Blocks) -> Tensor:
        return self.weights(blocks).sum()


class UniformWeighting(_FixedWeighting):
    """Every supervised label counts the same. Divided by the number of labels."""

    kind: Literal["uniform"] = "uniform"

    def label_weights(self, losses: Tensor, label_mask: Tensor, first_label: Tensor) -> Tensor:
        return uniform_weights(label_mask)

    def weights(self, blocks: Blocks) -> Tensor:
        return uniform_weights(blocks.label_mask)


class DecayWeighting(_FixedWeighting):
    """Later labels count less: exp(-(k - k0) / gamma). Divided by the sum of the weights."""

    kind: Literal["decay"] = "decay"
    gamma: float = Field(default=7.0, gt=0, allow_inf_nan=False)

    def label_weights(self, losses: Tensor, label_mask: Tensor, first_label: Tensor) -> Tensor:
        return decay_weights(label_mask, first_label, self.gamma)

    def weights(self, blocks: Blocks) -> Tensor:
        return decay_weights(blocks.label_mask, blocks.first_label, self.gamma)


class DPaceWeighting(_Weighting):
    """D-PACE (arXiv 2605.18810): labels count by what the accept length stands to win from them, as the draft is now.

    Divided by the number of blocks that have a supervised label. `alpha` smooths the confidences towards 1.
    """

    kind: Literal["dpace"] = "dpace"
    alpha: float = Field(default=0.5, gt=0, le=1)
    variant: Literal["full", "cumulative_confidence", "continuation_value"] = "full"

    def label_weights(self, losses: Tensor, label_mask: Tensor, first_label: Tensor) -> Tensor:
        weigh = {
            "full": dpace_weights,
            "cumulative_confidence": cumulative_confidence_weights,
            "continuation_value": continuation_value_weights,
        }[self.variant]
        return weigh(losses, label_mask, self.alpha)

    def denominator(self, blocks: Blocks) -> Tensor:
        return blocks.label_mask.any(-1).sum().float()


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
