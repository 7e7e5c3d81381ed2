"""How much each label of a block counts: position weights, as functions of tensors.

Labels run along the last dimension, 0 to P-1. `first_label` [...] is the first label that a block has to predict (0, or
more where a prefix is visible), from which positions count; `label_mask` [..., P] says which labels are supervised.
Every function returns float32 weights [..., P] that are 0 where the mask is False and carry no gradient.
"""

import torch
from torch import Tensor


def uniform_weights(label_mask: Tensor) -> Tensor:
    """Every supervised label counts 1."""
    return label_mask.float()


def decay_weights(label_mask: Tensor, first_label: Tensor, gamma: float) -> Tensor:
    """exp(-(k - k0) / gamma), k0 being the first label to predict (DFlash, arXiv 2602.06036)."""
    label = torch.arange(label_mask.shape[-1], device=label_mask.device)
    steps = (label - first_label.unsqueeze(-1)).clamp_min(0)  # [..., P]; the visible ones are masked below
    return torch.exp(-steps.float() / gamma) * label_mask


def _smoothed_confidence(losses: Tensor, label_mask: Tensor, alpha: float) -> Tensor:
    """(1 - alpha) * exp(-CE) + alpha where supervised, 1 elsewhere: a label without supervision breaks no chain."""
    confidence = (1.0 - alpha) * torch.exp(-losses.detach().float()) + alpha
    return torch.where(label_mask, confidence, torch.ones_like(confidence))


def cumulative_confidence_weights(losses: Tensor, label_mask: Tensor, alpha: float) -> Tensor:
    """D-PACE's first factor alone: p_k, the smoothed chance that labels up to k are all predicted (arXiv 2605.18810).

    losses [..., P] are the cross-entropies of the labels; alpha in (0, 1].
    """
    return _smoothed_confidence(losses, label_mask, alpha).cumprod(-1) * label_mask


def continuation_value_weights(losses: Tensor, label_mask: Tensor, alpha: float) -> Tensor:
    """D-PACE's second factor alone: (sum_{j>=k} p_j m_j) / p_k, what is still to be won once label k is reached.

    Worked backwards as c_k = m_k + qs_{k+1} c_{k+1}, which never divides by a p_k that has underflowed.
    """
    confidence = _smoothed_confidence(losses, label_mask, alpha)
    mask = label_mask.float()
    value = torch.zeros_like(confidence[..., 0])
    reach = torch.ones_like(value)
    values = []
    for k in reversed(range(mask.shape[-1])):
        value = mask[..., k] + reach * value
        reach = confidence[..., k]
        values.append(value)
    return torch.stack(values[::-1], dim=-1) * mask


def dpace_weights(losses: Tensor, label_mask: Tensor, alpha: float) -> Tensor:
    """D-PACE: sum_{j>=k} p_j m_j, the share of the expected accept length that hangs on label k (arXiv 2605.18810)."""
    reached = _smoothed_confidence(losses, label_mask, alpha).cumprod(-1) * label_mask
    return reached.flip(-1).cumsum(-1).flip(-1) * label_mask
