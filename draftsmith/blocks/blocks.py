"""The training blocks of a packed batch: anchors, inputs, labels and masks in one place."""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from draftsmith.base.rounding import round_up
from draftsmith.base.tensor_fields import TensorFields


@dataclass(frozen=True)
class Blocks(TensorFields):
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

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers that shape the work on these blocks beside the tensors' own shapes: `max_labels`."""
        return (self.max_labels,)

    def rounded(self) -> Self:
        """The same blocks with `max_labels` rounded up, by at most a sixteenth and to no more than there are places, so
        that few numbers occur."""
        count = max(self.max_labels, 1)
        step = max(64, 1 << max(count.bit_length() - 5, 0))
        return replace(self, max_labels=min(round_up(count, step), self.label_mask.numel()))
