"""How many tokens of a block are accepted: teacher-forced, and of the verifies that the engine ran."""

from collections.abc import Sequence

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


def counted_verifies(accept_lengths: Sequence[int], finish_reason: str) -> list[int]:
    """The verifies of an answer that its accept length is the mean of: tokens committed by each.

    The last verify of an answer that met its length limit is left out: the limit, not the draft, may have cut it. A
    stop token is part of the text, so the verify that commits it counts, with the tokens up to it.
    """
    return list(accept_lengths[:-1] if finish_reason == "length" else accept_lengths)
