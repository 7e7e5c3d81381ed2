"""Drafts that carry pieces of a vocabulary: only the target's whole vocabulary, in its own order, is supported."""

from typing import Any

import torch
from torch import Tensor

from draftsmith.layouts.canonical import LayoutError

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TARGET_TO_DRAFT, DRAFT_TO_TARGET = "t2d", "d2t"


def check_whole_vocabulary(extras: dict[str, Tensor], vocab_size: Any, draft_vocab_size: Any = None) -> None:
    """Refuses a draft over a part of the target's vocabulary, or over another order of it.

    extras: the draft's copies of the target's ends and its vocabulary maps, by their names without prefix: t2d [V],
    which tokens the draft knows; d2t [V'], what to add to a draft id to get the target's (or, in some files, the
    target's id itself). Raises `LayoutError`.
    """
    fix = "drafts over a reduced vocabulary are not supported: train or download one over the target's whole vocabulary"
    if draft_vocab_size is not None and draft_vocab_size != vocab_size:
        raise LayoutError(f"draft_vocab_size is {draft_vocab_size!r}, but vocab_size is {vocab_size!r}; {fix}")
    if not isinstance(vocab_size, int):
        return  # which the configuration's own checks refuse
    for name in (EMBEDDING, HEAD):
        if name in extras and (extras[name].dim() != 2 or extras[name].shape[0] != vocab_size):
            raise LayoutError(f"{name} is {list(extras[name].shape)}, but vocab_size is {vocab_size}; {fix}")
    for name in (TARGET_TO_DRAFT, DRAFT_TO_TARGET):
        if name in extras and extras[name].numel() != vocab_size:
            raise LayoutError(f"{name} has {extras[name].numel()} ids, but vocab_size is {vocab_size}; {fix}")
    known = extras.get(TARGET_TO_DRAFT)
    if known is not None and not known.bool().all():
        raise LayoutError(f"{TARGET_TO_DRAFT} leaves out {int((~known.bool()).sum())} of {known.numel()} tokens; {fix}")
    offsets = extras.get(DRAFT_TO_TARGET)
    if offsets is not None and bool(offsets.any()):
        ids = torch.arange(offsets.numel())
        if not torch.equal(offsets.flatten().to(ids.dtype), ids):
            raise LayoutError(f"{DRAFT_TO_TARGET} maps draft ids to other target ids; {fix}")
