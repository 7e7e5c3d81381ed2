"""The decoding attention kernel on the device: every dtype and head dimension, long contexts, bitwise invariance."""

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


SHAPES = {
    "one query, one row": dict(batch=1, heads=4, kv=4, width=1, length=131, causal=True),
    "verify of 16, grouped heads": dict(batch=3, heads=32, kv=8, width=16, length=700, causal=True),
    "sliding, one key head": dict(batch=2, heads=6, kv=1, width=7, length=2111, causal=True, window=100),
    "block both ways, sinks": dict(batch=8, heads=8, kv=2, width=32, length=500, causal=False, sinks=True),
    "block both ways, window, cap": dict(
        batch=2, heads=8, kv=2, width=16, length=900, causal=False, window=100, cap=20.0
    ),
    "prompt": dict(batch=2, heads=8, kv=2, width=77, length=500, causal=True),
    "prompt, window, cap": dict(batch=1, heads=4, kv=4, width=300, length=1300, causal=True, window=130, cap=20.0),
}


# Every head dimension with a verify and a prompt, every shape with two of them: each case compiles a kernel.
DIMS = {"verify of 16, grouped heads": (64, 96, 128, 256), "prompt": (64, 96, 128, 256)}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "dim"), [(shape, dim) for shape in SHAPES for dim in DIMS.get(shape, (64, 96))])
def test_kernel_equals_reference(dtype, dim, shape):
    from draftsmith.kernels.attention.block_attention import block_attention, block_attention_reference
    from draftsmith.kernels.attention.visibility import CachePattern

    case = dict(SHAPES[shape])
    sizes = [case.pop(name) for name in ("batch", "heads", "kv", "width")]
    q, k, v, start = _inputs(*sizes, dim, case.pop("length"), dtype, seed=dim)
    options = {"scale": dim**-0.5, "softcap": case.pop("cap", None)}
    options["sinks"] = torch.randn(sizes[1], device="cuda") if case.pop("sinks", False) else None
    pattern = CachePattern(start, **case)
    expected = block_attention_reference(q, k, v, pattern, **options)
    actual = block_attention(q, k, v, pattern, **options)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    reach = int(start.max()) + sizes[3]
    shorter = block_attention(q, k[:, :, :reach], v[:, :, :reach], pattern, **options)
    assert torch.equal(shorter, actual), "results do not depend on how far the cache may reach"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bitwise_the_same_from_any_slot_and_beside_any_neighbour(dtype):
    from draftsmith.kernels.attention.block_attention import block_attention
    from draftsmith.kernels.attention.visibility import CachePattern

    q, k, v, _ = _inputs(4, 32, 8, 16, 128, 3000, dtype, seed=1)
    start = torch.tensor([2900, 127, 700, 1500], device="cuda")
    scale = 128**-0.5
    whole = block_attention(q, k, v, CachePattern(start, True), scale=scale)
    for shift in (1, 5, 15):
        shifted = torch.randn_like(q)
        shifted[:, :, : 16 - shift] = q[:, :, shift:]
        moved = block_attention(shifted, k, v, CachePattern(start + shift, True), scale=scale)
        assert torch.equal(moved[:, :, : 16 - shift], whole[:, :, shift:])
    order = torch.tensor([2, 0, 3, 1], device="cuda")
    reordered = block_attention(q[order], k[order], v[order], CachePattern(start[order], True), scale=scale)
    assert torch.equal(reordered, whole[order])
