"""One document with its features, as a store holds it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.features.schema import CaptureLayout


@dataclass(frozen=True)
class Record:
    """A sample and its features.

    input_ids [S] int64; loss_mask [S] bool; features: name -> [S, width], on the CPU. What is read from a store has
    `CaptureLayout.widths` in `feature_dtype`; what is written into one has the tensors of `CaptureLayout.stored`, which
    are the same but for 8-bit stores (`features.encoding`). Feature tensors read from a store may be views of mapped
    files: do not write into them.
    """

    sample_id: str
    input_ids: Tensor
    loss_mask: Tensor
    features: dict[str, Tensor]


def check_record(record: Record, layout: CaptureLayout) -> None:
    """Raise `DraftsmithError` unless `record` is exactly what files of a store of `layout` hold."""

    def refuse(what: str) -> None:
        raise DraftsmithError(f"sample {record.sample_id!r}: {what}")

    if not record.sample_id:
        refuse("the id is empty; every sample needs a name of its own")
    length = record.input_ids.shape[0]
    if record.input_ids.shape != (length,) or length == 0:
        refuse(f"input_ids have shape {list(record.input_ids.shape)}; they must be [S] with S >= 1")
    if record.input_ids.dtype != torch.int64:
        refuse(f"input_ids are {record.input_ids.dtype}; they must be torch.int64")
    if record.loss_mask.shape != (length,) or record.loss_mask.dtype != torch.bool:
        refuse(
            f"loss_mask is {record.loss_mask.dtype} {list(record.loss_mask.shape)}; it must be torch.bool [{length}]"
        )
    stored = layout.stored
    if set(record.features) != set(stored):
        refuse(f"features are {sorted(record.features)}; the layout wants {sorted(stored)}")
    for name, (width, dtype) in stored.items():
        tensor = record.features[name]
        if tensor.shape != (length, width) or tensor.dtype != dtype:
            refuse(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be {dtype} [{length}, {width}]")
