"""The trainee of methods that learn from blocks of masked slots (DFlash, arXiv 2602.06036): anchors drawn in every
document, one forward of the draft over all blocks, and an objective on the slots' states."""

import logging
from dataclasses import dataclass, replace
from typing import Generic, Protocol

import torch
from torch import Tensor

from draftsmith.algorithms.trainee import Computation, Draw, Terms, Work
from draftsmith.blocks.anchored import check_anchored, takes
from draftsmith.blocks.anchors import Anchors, VisibleSlots, sample_anchors
from draftsmith.blocks.blocks import Blocks
from draftsmith.blocks.build import build_blocks
from draftsmith.blocks.layout import BlockLayout
from draftsmith.blocks.masks import AttentionBackend, training_attention
from draftsmith.drafts.config import DraftConfig
from draftsmith.drafts.draft import Draft, HeadT
from draftsmith.features.batch import PackedBatch
from draftsmith.features.schema import FINAL_STATE, TAPS
from draftsmith.kernels.device import shared_memory
from draftsmith.targets.ends import TargetEnds

_log = logging.getLogger(__name__)

BLOCK_BUCKET = 32
"""The number of blocks a row is rounded up to a multiple of this, so that shapes repeat."""

# --- the objective ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockOutputs:
    """What one training forward hands to the objective.

    hidden [R, N, B, H], the draft's final normed state of every slot; blocks as built from the batch; final_state
    [R, S, H], the target's own (only where `CaptureLayout.final_state` asks); progress as for `Trainee.terms`.
    """

    hidden: Tensor
    blocks: Blocks
    final_state: Tensor | None
    progress: Tensor


class Objective(Protocol[HeadT]):
    """The training loss of a method; HeadT: the head of its drafts."""

    def terms(self, draft: Draft[HeadT], ends: TargetEnds, outputs: BlockOutputs) -> Terms: ...


# --- examples --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockMaker:
    """Draws the blocks of packed rows: an `ExampleMaker`.

    config: the draft's; visible_slots: how much of each training block is visible, as for `sample_anchors`. An
    evaluation predicts every block from its anchor on, as in serving, and counts whole blocks only.
    """

    layout: BlockLayout
    config: DraftConfig
    visible_slots: VisibleSlots | None = None

    def examples(self, packed: PackedBatch, draw: Draw) -> Blocks:
        """Blocks whose anchors are drawn for (seed, epoch, document id), at most `draw.most` in a document."""
        anchors = sample_anchors(
            packed.loss_mask,
            packed.document,
            packed.sample_ids,
            self.layout,
            draw.most,
            seed=draw.seed,
            epoch=draw.epoch,
            visible_slots=self.visible_slots,
            bucket=BLOCK_BUCKET,
        )
        return self._blocks(packed, anchors)

    def held_out(self, packed: PackedBatch, draw: Draw) -> Blocks:
        """Blocks of which only the anchor is visible, and of these the whole ones. How much of a block the target would
        accept past the end of its document nobody knows, and an accept length that took the end for a rejection would
        lie below that of serving."""
        return whole_blocks(replace(self, visible_slots=None).examples(packed, draw))

    def work(self, packed: PackedBatch, examples: Blocks) -> Work:
        """As `ExampleMaker`; see `block_flops`."""
        tokens = packed.num_tokens
        return Work(tokens, block_flops(self.config, tokens, packed.positions, examples))

    def largest(self, rows: int, tokens: int) -> Blocks:
        """A block a token."""
        one = torch.zeros(1, 1, dtype=torch.int64)
        packed = PackedBatch(one, one.bool(), one, one, {}, [])
        blocks = self._blocks(packed, Anchors(one, one.bool(), one + 1))
        count = tokens + BLOCK_BUCKET
        return blocks.mapped(lambda each: each.new_empty(rows, count, *each.shape[2:], device="meta"))

    def _blocks(self, packed: PackedBatch, anchors: Anchors) -> Blocks:
        return build_blocks(
            packed.input_ids,
            packed.loss_mask,
            packed.positions,
            packed.document,
            anchors,
            self.layout,
            self.config.block_for("training on blocks").mask_token_id,
        )


def whole_blocks(blocks: Blocks) -> Blocks:
    """The same blocks, without the labels of those of which some label is not supervised."""
    return replace(blocks, label_mask=blocks.label_mask & blocks.label_mask.all(-1, keepdim=True))


def block_flops(config: DraftConfig, tokens: int, positions: Tensor, blocks: Blocks) -> float:
    """Multiplications and additions of forward and backward: 2 a weight and token forward, twice that backward, less
    the gradients that nobody needs: of the frozen output head's weight, and of the features that are fused.

    tokens: of documents; positions [R, S] int64, of tokens in their documents; blocks on the CPU. The matrix products
    of the backbone and the output head, with full attention; a method's own head is not counted.
    """
    size = blocks.input_ids.shape[-1]
    valid = int(blocks.valid.sum())
    slots, labels = valid * size, int(blocks.label_mask.sum())
    seen = positions.gather(1, blocks.anchors)[blocks.valid]  # context before each anchor
    pairs = (int(seen.sum()) + slots) * size  # of a slot and a key that it sees
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    keys_values = 2 * hidden * config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * width + keys_values + 3 * hidden * config.intermediate_size
    fusion = len(config.target_layer_ids) * hidden * hidden
    forward = 2.0 * slots * config.num_hidden_layers * layer
    forward += 2.0 * tokens * config.num_hidden_layers * keys_values
    forward += 4.0 * pairs * config.num_hidden_layers * width
    return 3.0 * forward + 4.0 * tokens * fusion + 4.0 * labels * hidden * config.vocab_size


# --- the trainee -----------------------------------------------------------------------------------------------------


class BlockTrainee(Generic[HeadT]):
    """A `Trainee` that runs all blocks of a micro-batch over their context, and its objective on the slots' states.

    Sets up the draft's backbone as `how` says. Raises `DraftsmithError` for an attention that cannot compute this
    draft's layers.
    """

    def __init__(self, draft: Draft[HeadT], ends: TargetEnds, objective: Objective[HeadT], how: Computation) -> None:
        self.draft = draft
        self.objective = objective
        self.attention = training_backend(draft.config, how)
        self._ends = ends
        draft.backbone.recompute = how.recompute
        if how.compile_layers:
            draft.backbone.fuse()

    def terms(self, packed: PackedBatch, examples: Blocks, progress: Tensor) -> Terms:
        """As `Trainee`. Raises `DraftsmithError` where the attention cannot run on the batch's device."""
        draft, ends = self.draft, self._ends
        attend = training_attention(examples, packed.document, draft.attention_kinds, self.attention)
        context = draft.context_keys_values(packed.features[TAPS], packed.positions)
        hidden = draft(ends.embedding_rows(examples.input_ids), examples.positions, context, attend)
        outputs = BlockOutputs(hidden, examples, packed.features.get(FINAL_STATE), progress)
        return self.objective.terms(draft, ends, outputs)


def training_backend(config: DraftConfig, how: Computation) -> AttentionBackend:
    """The attention to train with: as asked for, or for "auto", which is logged, dense off CUDA devices, and on one the
    kernels made for it where they take this draft, else flex. Raises `DraftsmithError` as `check_anchored` does."""
    group = config.num_attention_heads // config.num_key_value_heads
    block_size = config.block_for("training on blocks").size
    if how.attention != "auto":
        attention = AttentionBackend(how.attention)
        if attention is AttentionBackend.ANCHORED:
            check_anchored(config.head_dim, group, block_size)
        return attention
    attention = AttentionBackend.DENSE
    if how.device.type == "cuda":
        memory = shared_memory(how.device)
        taken = takes(config.head_dim, how.autocast or torch.float32, group, block_size, memory)
        attention = AttentionBackend.ANCHORED if taken else AttentionBackend.FLEX
    _log.info("train.attention: auto -> %s on %s", attention, how.device)
    return attention
