"""New loss masks for a store, beside the features that stay."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.base.files import replacing, sync_directory
from draftsmith.features.manifest import MANIFEST_FILE, StoreHeader, to_json
from draftsmith.features.shards import HEADER_FILE, finished_shards, write_tokens
from draftsmith.features.tables import ShardTokens


def rewrite_masks(directory: Path, header: StoreHeader, masks: Mapping[str, Tensor]) -> None:
    """Replace the loss mask of every document in the shards of `directory` by `masks` (id -> bool [S]), and the header.

    The manifest goes first: from then on the store counts as unfinished, so that old and new masks are never read
    beside each other, whenever this is killed; doing it again goes on from there. `write_manifest` makes it a store
    again. The caller is the `sole_writer`. Raises `KeyError` for a document without mask.
    """
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    sync_directory(directory)
    with replacing(directory / HEADER_FILE) as file:
        file.write(to_json(header))
    for shard in finished_shards(directory):
        path = directory / shard.entry.tokens_file.name
        tokens = ShardTokens.read(path)
        mask = torch.cat([masks[sample_id] for sample_id in tokens.sample_ids]).to(tokens.loss_mask.dtype)
        if not torch.equal(mask, tokens.loss_mask):
            write_tokens(path, replace(tokens, loss_mask=mask), shard.entry.features_file)
