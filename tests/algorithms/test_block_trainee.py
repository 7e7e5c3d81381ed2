"""What every method of the block family learns from, and how much work that is."""

import pickle

import numpy as np
import pytest
import torch

from draftsmith.algorithms.block_trainee import BLOCK_BUCKET, block_flops, training_backend
from draftsmith.algorithms.build import draft_config
from draftsmith.algorithms.registry import algorithm
from draftsmith.algorithms.trainee import Computation, Draw, Work
from draftsmith.errors import DraftsmithError
from draftsmith.features.packing import collate
from draftsmith.features.record import Record
from tests.support.every_method import METHODS, section_of
from tests.training.counting import MASK, counting_target

LENGTHS = [[17, 9], [23]]
TOKENS = 26


def packed_rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [
            Record(
                f"{row}-{number}",
                torch.randint(18, (length,), generator=generator),
                torch.rand(length, generator=generator) < 0.8,
                {},
            )
            for number, length in enumerate(lengths)
        ]
        for row, lengths in enumerate(LENGTHS)
    ]
    return collate(rows, TOKENS)


def made(name):
    section = section_of(name, mask_token_id=MASK)
    config = draft_config(section, counting_target().info)
    return algorithm(name).examples(config, section), config


@pytest.mark.parametrize("name", METHODS)
def test_readers_get_a_maker_that_holds_no_network_and_makes_the_same(name):
    maker, _ = made(name)
    packed, draw = packed_rows(), Draw(seed=3, epoch=2, most=4)
    content = pickle.dumps(maker)
    assert len(content) < 10_000
    again = pickle.loads(content)
    wanted, found = maker.examples(packed, draw).tensors(), again.examples(packed, draw).tensors()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(tensor, found[tensor_name]) for tensor_name, tensor in wanted.items())
    other = maker.examples(packed, Draw(seed=3, epoch=3, most=4)).tensors()
    assert not torch.equal(other["anchors"], wanted["anchors"])


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_no_examples_are_larger_than_the_largest(name):
    maker, _ = made(name)
    largest = maker.largest(2, TOKENS).tensors()
    blocks = maker.examples(packed_rows(), Draw(0, 0, 99)).tensors()
    assert largest.keys() == blocks.keys()
    for tensor_name, tensor in blocks.items():
        assert largest[tensor_name].is_meta
        assert largest[tensor_name].dtype == tensor.dtype
        assert all(most >= size for most, size in zip(largest[tensor_name].shape, tensor.shape, strict=True))
    assert largest["anchors"].shape == (2, TOKENS + BLOCK_BUCKET)


def test_work_counts_documents_and_valid_blocks_only():
    maker, config = made("dflash")
    packed = packed_rows()
    blocks = maker.examples(packed, Draw(0, 0, 5))
    layers, width = config.num_hidden_layers, config.num_attention_heads * config.head_dim
    anchors, size = np.asarray(blocks.anchors[blocks.valid]), config.block.size
    rows = np.asarray(blocks.valid.nonzero()[:, 0])
    multiplications = 0
    for row, anchor in zip(rows, anchors, strict=True):
        before = int(packed.positions[row, anchor])
        projections = config.hidden_size * (2 * width + 2 * config.num_key_value_heads * config.head_dim)
        mlp = 3 * config.hidden_size * config.intermediate_size
        multiplications += layers * size * (projections + mlp + 2 * (before + size) * width)
    tokens = sum(map(sum, LENGTHS))
    multiplications += layers * tokens * 2 * config.hidden_size * config.num_key_value_heads * config.head_dim
    labels = int(blocks.label_mask.sum())
    fusion = len(config.target_layer_ids) * config.hidden_size**2
    # Of weights and features without a gradient the backward takes half.
    wanted = 3 * 2 * multiplications + 2 * 2 * (tokens * fusion + labels * config.hidden_size * config.vocab_size)
    assert maker.work(packed, blocks) == Work(tokens, block_flops(config, tokens, packed.positions, blocks))
    assert maker.work(packed, blocks).flops == pytest.approx(wanted, rel=1e-12)
    assert packed.num_tokens == tokens  # the second document fills its row: it has no tail


def test_an_attention_that_cannot_compute_the_layers_is_refused():
    _, config = made("dflash")
    how = Computation(torch.device("cpu"), attention="anchored")
    with pytest.raises(DraftsmithError, match=r"takes heads of 16 to 128 channels.*train.attention=flex"):
        training_backend(config, how)
    assert training_backend(config, Computation(torch.device("cpu"))).value == "dense"
