"""A small language that a draft can learn by heart, captured from a tiny random target."""

from pathlib import Path
from typing import Any

import torch

from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.dflash import DFlashSection
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.section import DraftSection
from draftsmith.features.identity import target_identity
from draftsmith.features.manifest import StoreHeader
from draftsmith.features.reader import Store
from draftsmith.features.record import Record
from draftsmith.features.schema import FINAL_STATE, TAPS, CaptureLayout
from draftsmith.features.shards import StoreWriter, finish_store
from draftsmith.targets.target import Target
from draftsmith.training.micro_batch import BatchMaker
from draftsmith.training.options import TrackOptions, TrainOptions
from draftsmith.training.source import StoreSource
from tests.support.tiny import tiny_target

MASK = 18
SYMBOLS = 16
TAP_IDS = (1, 2)
QUIET = TrackOptions(console=False, tensorboard=False, every=1)


BASE: dict[str, Any] = {
    "mask_token_id": MASK,
    "block_size": 4,
    "num_hidden_layers": 1,
    "target_layer_ids": TAP_IDS,
    "dtype": "float32",
}
"""What the `draft` sections of these tests share."""


def counting_target() -> Target:
    return tiny_target("llama", vocab_size=19, num_layers=4)


def identity_of(target: Target) -> Any:
    return target_identity("tiny", None, target.text_config, target.ends.head_weight)


def counting_store(
    directory: Path,
    target: Target,
    *,
    documents: int = 20,
    unsupervised: tuple[int, ...] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    final_state: bool = False,
    shift: int = 0,
) -> Store:
    """Documents of 9 to 23 tokens: a prompt token, then 0, 1, ..., SYMBOLS-1, 0, ... from a random start. The documents
    numbered in `unsupervised` have an empty loss mask. shift: added to every id, around the end of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    layout = CaptureLayout(TAP_IDS, target.hidden_size, final_state=final_state, dtype=dtype)
    with StoreWriter(directory, StoreHeader.for_layout(layout, identity_of(target), None)) as writer:
        for number in range(documents):
            length = int(torch.randint(9, 24, (), generator=generator))
            start = int(torch.randint(SYMBOLS, (), generator=generator))
            ids = (torch.arange(length) + start) % SYMBOLS
            ids[0] = SYMBOLS + 1
            ids = (ids + shift) % target.info.vocab_size
            states = target.forward(ids[None], torch.arange(length)[None], tap_ids=TAP_IDS, final_state=final_state)
            mask = torch.ones(length, dtype=torch.bool)
            mask[0] = False
            if number in unsupervised:
                mask[:] = False
            features = {TAPS: states.taps, FINAL_STATE: states.final_state}
            kept = {name: tensor[0].to(dtype) for name, tensor in features.items() if tensor is not None}
            writer.add(Record(f"doc-{number}", ids, mask, kept))
    finish_store(directory)
    return Store.open(directory)


def section(**fields: Any) -> DFlashSection:
    return DFlashSection(**{**BASE, **fields})


def options(**fields: Any) -> TrainOptions:
    return TrainOptions(
        **{
            "device": "cpu",
            "tokens_per_row": 48,
            "num_anchors": 8,
            "rows_per_step": 2,
            "max_steps": 6,
            "lr": 3e-3,
            "eval_share": 0.15,
            **fields,
        }
    )


def batches_of(
    store: Store,
    *,
    chosen: DraftSection | None = None,
    num_anchors: int = 5,
    seed: int = 5,
    tokens_per_row: int = 48,
) -> BatchMaker:
    """What makes the micro-batches of `store` for a draft of the section `chosen` (None: `section()`)."""
    chosen = chosen or section()
    method = algorithm(chosen.algorithm)
    config = draft_config(chosen, counting_target().info)
    source = StoreSource(store, tuple(method.capture(config).widths))
    return BatchMaker(source, method.examples(config, chosen), tokens_per_row, num_anchors, seed)
