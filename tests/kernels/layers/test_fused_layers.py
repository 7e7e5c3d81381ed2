"""RMS norm, gated activation and rope-and-cache against their plain references."""

import pytest
import torch

pytest.importorskip("triton")

from draftsmith.kernels.attention.rope_cache import HeadNorms, rope_cache, rope_cache_reference
from draftsmith.kernels.layers.gated_activation import gated_activation, gated_activation_reference
from draftsmith.kernels.layers.rms_norm import rms_norm, rms_norm_reference
from draftsmith.kernels.tiling import Tiling

DTYPES = [torch.float32, torch.float16]


def _close(actual, expected):
    tolerance = 1e-5 if expected.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [33, 576])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(dtype, width, with_residual, unit_offset):
    torch.manual_seed(width)
    x, weight = torch.randn(2, 3, width).to(dtype), torch.randn(width).to(dtype)
    residual = torch.randn(2, 3, width).to(dtype) if with_residual else None
    for actual, expected in zip(
        rms_norm(x, weight, 1e-6, residual, unit_offset=unit_offset),
        rms_norm_reference(x, weight, 1e-6, residual, unit_offset=unit_offset),
        strict=True,
    ):
        _close(actual, expected)
    changed = weight.clone()
    changed[-1] += 1
    assert not torch.equal(rms_norm(x, changed, 1e-6)[0], rms_norm(x, weight, 1e-6)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_activation(dtype, activation):
    torch.manual_seed(1)
    x = 3 * torch.randn(2, 5, 2 * 1100).to(dtype)
    _close(gated_activation(x, activation), gated_activation_reference(x, activation))
    with pytest.raises(ValueError, match="relu"):
        gated_activation(x, "relu")


def test_many_rows_are_gated_in_large_pieces():
    x = torch.randn(61, 2 * 9001, generator=torch.Generator().manual_seed(2))
    gated = gated_activation(x, "silu")
    _close(gated, gated_activation_reference(x, "silu"))
    x[60, 9000] += 1.0  # the last gate of the last row
    other = (gated_activation_reference(x, "silu") - gated).abs() > 1e-3
    assert other.nonzero().tolist() == [[60, 9000]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (96, 96), (64, 32)])
@pytest.mark.parametrize(("norm", "unit_offset"), [(False, False), (True, False), (True, True)])
def test_rope_cache(dtype, dim, rotary, norm, unit_offset):
    torch.manual_seed(dim + rotary)
    batch, width, heads, kv_heads, length = 3, 2, 3, 1, 20
    qkv = torch.randn(batch, width, (heads + 2 * kv_heads) * dim).to(dtype)
    start = torch.tensor([0, 16, 7])
    angles = torch.rand(batch, width, rotary // 2) * 6
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    weights = [torch.randn(dim).to(dtype) for _ in range(2)]
    options = dict(heads=heads, norms=HeadNorms(*weights, 1e-6, unit_offset) if norm else None)
    results = []
    for function in (rope_cache, rope_cache_reference):
        caches = [torch.full((batch, kv_heads, length, dim), 7.0).to(dtype) for _ in range(2)]
        results.append((function(qkv, (cos, sin), start, caches, **options), *caches))
    for actual, expected in zip(*results, strict=True):
        _close(actual, expected)
    assert (results[0][1][0, :, 2:] == 7.0).all(), "entries past the block are untouched"


def test_addends_norms_after_sublayers_and_tables():
    """What a decode step hands over: addends of a product in fp32, and angles by position."""
    torch.manual_seed(8)
    addends, residual = torch.randn(3, 2, 2, 40), torch.randn(2, 2, 40).half()
    weight, post = torch.randn(40).half(), torch.randn(40).half()
    for unit_offset in (False, True):
        options = dict(unit_offset=unit_offset, post_weight=post, partial=True)
        for actual, expected in zip(
            rms_norm(addends, weight, 1e-6, residual, **options),
            rms_norm_reference(addends, weight, 1e-6, residual, **options),
            strict=True,
        ):
            assert actual.dtype == torch.float16
            _close(actual, expected)
    gate_up = torch.randn(2, 3, 1, 2 * 70)
    _close(gated_activation(gate_up, "silu", torch.float16), gated_activation_reference(gate_up, "silu", torch.float16))
    assert not torch.equal(
        gated_activation(gate_up, "silu", torch.float16), gated_activation(gate_up[:1], "silu", torch.float16)
    )


@pytest.mark.parametrize("heads_per_program", [1, 8])
def test_rope_cache_at_positions_of_each_token(heads_per_program):
    torch.manual_seed(heads_per_program)
    batch, width, heads, kv_heads, dim, length = 2, 2, 3, 2, 16, 30
    qkv = torch.randn(2, batch, width, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(length, dim // 2) * 6
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    positions = torch.arange(width) + torch.randint(0, length - width, (batch, 1))
    options = dict(heads=heads, norms=HeadNorms(torch.randn(dim), torch.randn(dim), 1e-6))
    results = []
    for function, tiles in ((rope_cache, {"tiling": Tiling(rows=heads_per_program)}), (rope_cache_reference, {})):
        caches = [torch.full((batch, kv_heads, length, dim), 7.0) for _ in range(2)]
        results.append((function(qkv, (cos, sin), positions, caches, **options, **tiles), *caches))
    for actual, expected in zip(*results, strict=True):
        _close(actual, expected)
    moved = [torch.full((batch, kv_heads, length, dim), 7.0) for _ in range(2)]
    rope_cache(qkv, (cos, sin), positions + 1, moved, **options)
    assert not torch.equal(moved[1], results[0][2])


def test_rope_cache_writes_where_it_is_told():
    """Tokens of one position, as siblings of a tree are, at places of their own."""
    torch.manual_seed(3)
    heads, kv_heads, dim = 2, 1, 16
    qkv, places = torch.randn(2, 3, (heads + 2 * kv_heads) * dim), torch.tensor([[4, 5, 6], [0, 1, 2]])
    angles = torch.rand(9, dim // 2) * 6
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    positions = torch.tensor([[4, 5, 5], [1, 2, 3]])
    options = dict(heads=heads, norms=None)
    results = []
    for function in (rope_cache, rope_cache_reference):
        caches = [torch.full((2, kv_heads, 9, dim), 7.0) for _ in range(2)]
        results.append((function(qkv, (cos, sin), positions, caches, places=places, **options), *caches))
    for actual, expected in zip(*results, strict=True):
        _close(actual, expected)
    query, keys, values = results[0]
    plain = [torch.full((2, kv_heads, 9, dim), 7.0) for _ in range(2)]
    assert torch.equal(rope_cache(qkv, (cos, sin), positions, plain, **options), query)
    assert torch.equal(keys[1, :, places[1]], plain[0][1, :, positions[1]])
    assert torch.equal(values[0, :, 4:7], qkv[0, None, :, -dim:])
    assert (keys[1, :, 3:] == 7.0).all()
