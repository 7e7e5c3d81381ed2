"""New loss masks for a store, beside the features that stay."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.features.files import Pieces, open_safetensors, replacing, sync_directory, write_safetensors
from draftsmith.features.manifest import MANIFEST_FILE, StoreHeader, read_header, to_json
from draftsmith.features.shards import HEADER_FILE, StoreWriter, finished_shards


def rewrite_masks(directory: Path, header: StoreHeader, masks: Mapping[str, Tensor]) -> None:
    """Replace the loss mask of every document in the shards of `directory` by `masks` (id -> bool [S]), and the header.

    The manifest goes first: from then on the store counts as unfinished, so that old and new masks are never read
    beside each other, whenever this is killed; doing it again goes on from there. `finish_store` makes it a store
    again. Raises `StoreError` while another process writes into the directory, `KeyError` for a document without mask.
    """
    StoreWriter(directory, read_header(directory / HEADER_FILE)).close()  # nobody else is writing
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    sync_directory(directory)
    with replacing(directory / HEADER_FILE) as file:
        file.write(to_json(header))
    for shard in finished_shards(directory):
        path = directory / shard.entry.tokens_file.name
        stored = open_safetensors(path)
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        mask = torch.cat([masks[sample_id] for sample_id in shard.sample_ids]).to(torch.uint8)
        if not torch.equal(mask, tensors["loss_mask"]):
            tensors["loss_mask"] = mask
            write_safetensors(path, {name: Pieces([t]) for name, t in tensors.items()}, stored.metadata() or {})
