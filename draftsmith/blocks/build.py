"""From anchors to blocks: what each slot reads, what it is to predict, and which labels count."""

import torch
from torch import Tensor

from draftsmith.blocks.anchors import Anchors
from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.layout import BlockLayout
from draftsmith.drafts.shapes import BlockShape
from draftsmith.kernels.layers.block_embeddings import block_embeddings
from draftsmith.targets.ends import TargetEnds


def anchor_block_inputs(anchor_ids: Tensor, block: BlockShape, ends: TargetEnds) -> Tensor:
    """What `Draft.forward` is given of blocks of which only the anchor is known (DFlash, arXiv 2602.06036): anchor_ids
    [n] int64 -> embeddings [n, B, H] of the anchor's token and of mask tokens, as the target's matrix has them.

    Blocks that show more are `build_blocks`'s.
    """
    return block_embeddings(ends.embedding_weight, anchor_ids, block.mask_token_id, block.size)


def build_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    positions: Tensor,
    document: Tensor,
    anchors: Anchors,
    layout: BlockLayout,
    mask_token_id: int,
) -> Blocks:
    """The blocks of a packed batch (DFlash, arXiv 2602.06036).

    input_ids, positions, document [R, S] int64, loss_mask [R, S] bool, as in a packed batch. A block reads the tokens
    of its visible slots, then the mask token; a visible slot past the end of the document reads the mask token too.
    Labels past the end of the document, outside the loss mask, visible already, or of blocks that only fill the shape
    are masked.
    """
    length = input_ids.shape[1]
    block_document = document.gather(1, anchors.index).unsqueeze(-1)  # [R, N, 1]
    first_label = anchors.visible - 1  # the last visible slot's token is the last known one

    slots = torch.arange(layout.block_size, device=input_ids.device)
    slot_index = anchors.index.unsqueeze(-1) + slots  # [R, N, B]
    slot_tokens, slot_document = _take(slot_index, input_ids, document)
    visible = (slots < anchors.visible.unsqueeze(-1)) & (slot_index < length) & (slot_document == block_document)
    block_ids = torch.where(visible, slot_tokens, torch.full_like(slot_tokens, mask_token_id))

    label_index = layout.label_positions(anchors.index)  # [R, N, P]
    labels, label_document, label_loss_mask = _take(label_index, input_ids, document, loss_mask)
    (previous_ids,) = _take(label_index - 1, input_ids)
    to_predict = torch.arange(layout.num_labels, device=input_ids.device) >= first_label.unsqueeze(-1)
    in_document = (label_index < length) & (label_document == block_document)
    label_mask = in_document & label_loss_mask & to_predict & anchors.valid.unsqueeze(-1)

    return Blocks(
        anchors=anchors.index,
        valid=anchors.valid,
        input_ids=block_ids,
        positions=positions.gather(1, anchors.index).unsqueeze(-1) + slots,
        labels=labels,
        label_index=label_index.clamp_max(length - 1),
        label_mask=label_mask,
        previous_ids=previous_ids,
        first_label=first_label,
        max_labels=int(label_mask.sum()),
    )


def _take(index: Tensor, *tokens: Tensor) -> list[Tensor]:
    """Entries of `tokens` [R, S] at `index` [R, N, K], which may run past the row's end (then any entry: mask it)."""
    flat = index.clamp_max(tokens[0].shape[1] - 1).flatten(1)  # [R, N*K]
    return [each.gather(1, flat).view(index.shape) for each in tokens]
