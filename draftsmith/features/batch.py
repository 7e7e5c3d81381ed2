"""Several documents packed into rows, with their features: what the reader hands to training."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
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

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "PackedBatch":
        """The same batch on `device`; shapes and dtypes stay."""
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        features = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.features.items()}
        return replace(self, features=features, **moved)
