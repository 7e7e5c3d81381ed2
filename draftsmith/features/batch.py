"""Several documents packed into rows, with their features: what the reader hands to training."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.base.tensor_fields import TensorFields


@dataclass(frozen=True)
class PackedBatch(TensorFields):
    """Rows of whole documents laid end to end; only a row's tail is unused.

    input_ids [R, S] int64; loss_mask [R, S] bool (False on the tail); positions [R, S] int64, a token's position in its
    own document; document [R, S] int64, the index of the token's document within its row (the tail counts as one more);
    features: name -> [R, S, width] (names and widths as the `CaptureLayout` says); sample_ids: per row, the ids of its
    documents.
    """

    input_ids: Tensor
    loss_mask: Tensor
    positions: Tensor
    document: Tensor
    features: dict[str, Tensor]
    sample_ids: list[list[str]]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of documents; on a device, the host waits for it."""
        documents = torch.tensor([len(ids) for ids in self.sample_ids], device=self.document.device)
        return int((self.document < documents.unsqueeze(1)).sum())
