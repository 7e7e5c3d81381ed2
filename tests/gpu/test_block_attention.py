"""The decoding attention kernel on the device: every dtype and head dimension, long contexts, bitwise invariance."""

import itertools

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def _inputs(batch, heads, kv, width, dim, length, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"device": "cuda", "generator": generator}
    q = torch.randn(batch, width, heads, dim, **options).to(dtype).transpose(1, 2)
    k = torch.randn(batch, kv, length, dim, **options).to(dtype)
    v = torch.randn(batch, kv, length, dim, **options).to(dtype)
    start = torch.randint(0, length - width + 1, (batch,), **options)
    return q, k, v, start


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 100), (False, None), (False, 100)])
def test_kernel_equals_reference(dtype, dim, causal, window):
    from draftsmith.kernels.block_attention import block_attention, block_attention_reference

    for (batch, length), (heads, kv), width in itertools.product(
        [(1, 131), (3, 700), (8, 2111)], [(4, 4), (32, 8), (6, 1)], [1, 7, 16, 32]
    ):
        q, k, v, start = _inputs(batch, heads, kv, width, dim, length, dtype, seed=length + width)
        sinks = torch.randn(heads, device="cuda")
        for options in ({}, {"sinks": sinks}, {"softcap": 20.0}):
            options = {"scale": dim**-0.5, "causal": causal, "window": window, **options}
            expected = block_attention_reference(q, k, v, start, **options)
            actual = block_attention(q, k, v, start, **options)
            torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bitwise_the_same_from_any_slot_and_beside_any_neighbour(dtype):
    from draftsmith.kernels.block_attention import block_attention

    q, k, v, _ = _inputs(4, 32, 8, 16, 128, 3000, dtype, seed=1)
    start = torch.tensor([2900, 127, 700, 1500], device="cuda")
    options = {"scale": 128**-0.5, "causal": True}
    whole = block_attention(q, k, v, start, **options)
    for shift in (1, 5, 15):
        shifted = torch.randn_like(q)
        shifted[:, :, : 16 - shift] = q[:, :, shift:]
        moved = block_attention(shifted, k, v, start + shift, **options)
        assert torch.equal(moved[:, :, : 16 - shift], whole[:, :, shift:])
    order = torch.tensor([2, 0, 3, 1], device="cuda")
    assert torch.equal(block_attention(q[order], k[order], v[order], start[order], **options), whole[order])
