"""What the parts of `two_gpus.py` share: the call, the processes, the shapes of models and drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, Qwen3Config

from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.section import DraftSection
from draftsmith.parallel.ranks import process_count, process_rank
from draftsmith.run.recipe import parse_recipe
from draftsmith.targets.ends import TargetEnds
from draftsmith.targets.info import TargetInfo

RANK, COUNT = process_rank(), process_count()


@dataclass(frozen=True)
class Shape:
    """A target's sizes, and the documents of one row of training."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    taps: tuple[int, ...]
    tokens: int  # of a document
    documents: int  # in a row
    anchors: int  # in a document

    def text_config(self, layers: int | None = None) -> PretrainedConfig:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=40_960,
            tie_word_embeddings=False,
        )


SHAPES = {
    "smollm2": Shape(576, 30, 9, 3, 64, 1536, 49_152, (1, 8, 14, 20, 27), 448, 16, 128),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12_288, 151_936, (1, 9, 17, 25, 33), 3072, 1, 512),
}
TINY = {
    "smollm2": Shape(32, 4, 2, 1, 16, 48, 98, (1, 3), 24, 3, 6),
    "qwen3-8b": Shape(48, 5, 3, 1, 16, 64, 132, (1, 3), 40, 1, 8),
}


@dataclass(frozen=True)
class Call:
    """What the command line says."""

    into: Path
    rows: int
    documents: int
    tiny: bool
    device: str

    def shape(self, name: str) -> Shape:
        return (TINY if self.tiny else SHAPES)[name]


@contextmanager
def first_alone() -> Iterator[bool]:
    """Whether this is the process that does what one does for all, when all have come here; the others wait for it."""
    if dist.is_initialized():
        dist.barrier()
    yield RANK == 0
    if dist.is_initialized():
        dist.barrier()


def draft_section(call: Call, shape: Shape, name: str, **fields: Any) -> DraftSection:
    """A draft of five layers (one, where sizes are tiny) with the method's published head."""
    method = algorithm(name)
    head = method.published_head if method.architecture != "dflash" else {}
    small = {"markov_rank": 6, "gru_hidden_dim": 12, "emb_dim": 10} if call.tiny else {}
    head = head | {key: value for key, value in small.items() if key in head}
    given = {
        "algorithm": name,
        "block_size": 4 if call.tiny else 16,
        "num_hidden_layers": 1 if call.tiny else 5,
        "target_layer_ids": shape.taps,
        "mask_token_id": shape.vocabulary - 1,
    }
    return parse_recipe({"run": "run", "target": {"path": "random"}, "draft": given | head | fields}).draft


def target_of(shape: Shape, device: str) -> tuple[TargetInfo, TargetEnds]:
    """Configuration and random ends: the same in every process, and in every call on the same kind of device."""
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.vocabulary, shape.hidden)
    embedding, head = (
        torch.empty(size, device=device, dtype=torch.bfloat16).normal_(std=0.02, generator=generator) for _ in range(2)
    )
    return TargetInfo(shape.text_config(), "random"), TargetEnds(embedding, head)
