"""The training blocks of a packed batch: anchors, inputs, labels and masks in one place."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """N blocks a row, B slots a block, P labels a block (`BlockLayout.num_labels`).

    anchors [R, N] int64, index of the anchor in its row; valid [R, N] bool, False for blocks that only fill the shape;
    input_ids [R, N, B] int64, the anchor's token (and any further visible ones), then the mask token;
    positions [R, N, B] int64, position in the document (anchor position + slot);
    labels [R, N, P] int64, the token each predicting slot is to predict; label_index [R, N, P] int64, its index in the
    row (the teacher's state for a label is the one at label_index - 1); label_mask [R, N, P] bool, True where the label
    lies in the block's own document and under its loss mask, the block is valid and the label is not already visible;
    previous_ids [R, N, P] int64, the true token before each label; first_label [R, N] int64, the first label that the
    block has to predict (0, or more where a prefix is visible: DTA), from which position weights count.
    max_labels: at least as many as `label_mask` holds, so that the host need not ask the device; a copy with a smaller
    mask may keep it.
    Where the mask is False, labels, label_index and previous_ids hold some token and index of the row.
    """

    anchors: Tensor
    valid: Tensor
    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    label_index: Tensor
    label_mask: Tensor
    previous_ids: Tensor
    first_label: Tensor
    max_labels: int

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Blocks":
        """The same blocks on `device`; shapes and dtypes stay."""
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Blocks":
        """The same blocks with every tensor passed through `function`."""
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
