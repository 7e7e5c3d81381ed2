"""DFlash's objective from the documents themselves: plain loops over documents, blocks and slots, one block a forward.

Nothing here knows of packed rows: the draft sees each block alone, over exactly the context that it may see.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.drafts.attention import DenseBlockAttention
from draftsmith.drafts.draft import Draft
from draftsmith.targets.ends import TargetEnds
from tests.blocks.packed import Document

Weigh = Callable[[list[float], list[bool], int], list[float]]
"""(losses, mask, first label to predict) of one block -> weights."""


@dataclass
class Sums:
    numerator: Tensor
    weights: float = 0.0
    blocks: int = 0
    accepted: int = 0
    correct: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)


def block_hidden(
    draft: Draft, ends: TargetEnds, document: Document, features: Tensor, anchor: int, visible: int
) -> Tensor:
    """Final states [B, H] of the block of `document` anchored at `anchor`; features [length, T*H]."""
    size, length = draft.config.block.size, len(document.ids)
    ids = [
        document.ids[anchor + k] if k < visible and anchor + k < length else draft.config.block.mask_token_id
        for k in range(size)
    ]
    positions = torch.arange(anchor, anchor + size)
    context = draft.context_keys_values(features[:anchor].unsqueeze(0), torch.arange(anchor).unsqueeze(0))
    masks = {}
    for kind in draft.attention_kinds:
        mask = torch.ones(size, anchor + size, dtype=torch.bool)
        for k in range(size):
            for key in range(anchor + size):
                distance = anchor + k - key
                if kind.window is not None and abs(distance) >= kind.window:
                    mask[k, key] = False
                if kind.causal and distance < 0:
                    mask[k, key] = False
        masks[kind] = mask.view(1, 1, size, anchor + size)
    embeddings = ends.embedding_rows(torch.tensor(ids)).view(1, 1, size, -1)
    return draft(embeddings, positions.view(1, 1, size), context, DenseBlockAttention(masks))[0, 0]


def objective(
    draft: Draft,
    ends: TargetEnds,
    documents: list[tuple[Document, Tensor, list[tuple[int, int]]]],
    weigh: Weigh,
) -> Sums:
    """documents: (document, features, its blocks as (anchor, visible slots))."""
    labels = draft.config.block.size - 1
    sums = Sums(torch.zeros(()), correct=[0] * labels, counted=[0] * labels)
    for document, features, blocks in documents:
        for anchor, visible in blocks:
            hidden = block_hidden(draft, ends, document, features, anchor, visible)
            losses, mask, right = [], [], []
            for j in range(labels):
                position = anchor + 1 + j
                counts = position < len(document.ids) and document.loss_mask[position] and j >= visible - 1
                logits = draft.logits(hidden[j + 1], ends)
                label = document.ids[position] if counts else 0
                losses.append(torch.logsumexp(logits, -1) - logits[label])
                mask.append(counts)
                right.append(counts and int(logits.argmax()) == label)
            weights = weigh([float(x.detach()) for x in losses], mask, visible - 1)
            for j in range(labels):
                if mask[j]:
                    sums.numerator = sums.numerator + weights[j] * losses[j]
                    sums.weights += weights[j]
                sums.counted[j] += mask[j]
                sums.correct[j] += right[j]
            if any(mask):
                sums.blocks += 1
                sums.accepted += 1
                for j in range(visible - 1, labels):
                    if not right[j]:
                        break
                    sums.accepted += 1
    return sums


def decay(gamma: float) -> Weigh:
    return lambda losses, mask, first: [math.exp(-(j - first) / gamma) * m for j, m in enumerate(mask)]


def uniform(losses: list[float], mask: list[bool], first: int) -> list[float]:
    return [float(m) for m in mask]
