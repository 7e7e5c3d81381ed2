"""Random records and stores for tests."""

from dataclasses import replace
from pathlib import Path

import torch

from draftsmith.features.encoding import decode, encode
from draftsmith.features.manifest import StoreHeader, StoreManifest, TargetIdentity, TokenizerIdentity
from draftsmith.features.record import Record
from draftsmith.features.schema import CaptureLayout
from draftsmith.features.shards import StoreWriter, finish_store

VOCABULARY = 53
TARGET = TargetIdentity(
    source="some/model",
    revision=None,
    config_hash="1" * 64,
    weights_hash="2" * 64,
    vocab_size=VOCABULARY,
    num_layers=6,
)
TOKENIZER = TokenizerIdentity(vocabulary_hash="3" * 64, template_hash="4" * 64)


def layout(final_state: bool = True, dtype: torch.dtype = torch.bfloat16) -> CaptureLayout:
    return CaptureLayout((4, 1), 3, final_state, dtype)


def header(of: CaptureLayout) -> StoreHeader:
    return StoreHeader.for_layout(of, TARGET, TOKENIZER)


def record(sample_id: str, length: int, of: CaptureLayout, generator: torch.Generator) -> Record:
    """As a writer takes it."""
    return Record(
        sample_id,
        torch.randint(0, VOCABULARY, (length,), generator=generator),
        torch.rand(length, generator=generator) < 0.5,
        encode({name: torch.randn(length, width, generator=generator) for name, width in of.widths.items()}, of),
    )


def records(lengths: list[int], of: CaptureLayout, seed: int = 0) -> list[Record]:
    generator = torch.Generator().manual_seed(seed)
    return [record(f"sample/{number} é", length, of, generator) for number, length in enumerate(lengths)]


def as_read(item: Record, of: CaptureLayout) -> Record:
    """What a store gives for a written record."""
    return replace(item, features=decode(item.features, of, of.widths))


def write_store(directory: Path, content: list[Record], of: CaptureLayout, shard_bytes: int = 400) -> StoreManifest:
    with StoreWriter(directory, header(of), shard_bytes) as writer:
        for item in content:
            writer.add(item)
    return finish_store(directory)


def equal(a: Record, b: Record) -> bool:
    return (
        a.sample_id == b.sample_id
        and a.input_ids.dtype == b.input_ids.dtype
        and torch.equal(a.input_ids, b.input_ids)
        and a.loss_mask.dtype == b.loss_mask.dtype
        and torch.equal(a.loss_mask, b.loss_mask)
        and a.features.keys() == b.features.keys()
        and all(
            a.features[name].dtype == b.features[name].dtype and torch.equal(a.features[name], b.features[name])
            for name in a.features
        )
    )
