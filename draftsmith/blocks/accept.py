"""How many tokens of a block would have been accepted, teacher-forced."""

import torch
from torch import Tensor


def leading_correct(correct: Tensor, label_mask: Tensor, first_label: Tensor) -> Tensor:
    """Correct labels before the first wrong one, block by block.

    correct, label_mask [..., P] bool; first_label [...] int64, the first label to predict: earlier ones are given and
    count neither way. A label without supervision ends the prefix, since nobody knows whether it would be accepted.
    Returns [...] int64 in [0, P - first_label]. One verify commits one token more than that (the bonus token).
    """
    label = torch.arange(correct.shape[-1], device=correct.device)
    given = label < first_label.unsqueeze(-1)  # [..., P]
    prefix = ((correct & label_mask) | given).long().cumprod(-1)
    return (prefix * ~given).sum(-1)
