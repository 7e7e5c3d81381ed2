"""The decoding attention kernel against its plain reference (Triton's interpreter on CPU; in full in tests/gpu)."""

import pytest
import torch

pytest.importorskip("triton")

from draftsmith.kernels.attention import block_attention as module
from draftsmith.kernels.attention.block_attention import attention_tiling, split_count
from draftsmith.kernels.attention.visibility import CachePattern, ancestors_of
from tests.support.trees import depths_of, random_parents

CASES = {
    "causal verify, grouped heads": dict(batch=2, heads=4, kv=2, width=5, dim=64, length=200, causal=True),
    "width one, sliding, odd dim": dict(batch=3, heads=2, kv=2, width=1, dim=96, length=150, causal=True, window=17),
    "block both ways with sinks": dict(batch=2, heads=4, kv=1, width=6, dim=64, length=200, causal=False, sinks=True),
    "block both ways, window, cap": dict(
        batch=2, heads=4, kv=1, width=7, dim=128, length=190, causal=False, window=40, softcap=30.0
    ),
    "more rows than a tile, sinks": dict(batch=1, heads=5, kv=1, width=27, dim=16, length=97, causal=True, sinks=True),
    "a prompt's chunk": dict(batch=1, heads=2, kv=1, width=75, dim=64, length=140, causal=True, window=30),
}


def block_attention(q, k, v, start, *, causal, window=None, ancestors=None, splits=None, block_m=None, **options):
    """By the kernel, in tiles as it chooses them but for `splits` and `block_m`."""
    tiling = attention_tiling(q, k.shape[1])
    tiling = tiling._replace(rows=block_m or tiling.rows, splits=splits or tiling.splits)
    return module.block_attention(q, k, v, CachePattern(start, causal, window, ancestors), tiling=tiling, **options)


def block_attention_reference(q, k, v, start, *, causal, window=None, ancestors=None, **options):
    return module.block_attention_reference(q, k, v, CachePattern(start, causal, window, ancestors), **options)


def _inputs(case: dict, dtype: torch.dtype, seed: int):
    generator = torch.Generator().manual_seed(seed)
    shape = dict(case)
    batch, heads, kv, width, dim, length = (shape.pop(k) for k in ("batch", "heads", "kv", "width", "dim", "length"))
    q = torch.randn(batch, width, heads, dim, generator=generator).to(dtype).transpose(1, 2)
    k = torch.randn(batch, kv, length, dim, generator=generator).to(dtype)
    v = torch.randn(batch, kv, length, dim, generator=generator).to(dtype)
    start = torch.randint(0, length - width + 1, (batch,), generator=generator)
    sinks = torch.randn(heads, generator=generator) if shape.pop("sinks", False) else None
    return (q, k, v, start), dict(scale=dim**-0.5, sinks=sinks, **shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("name", "splits"), [*((name, 4) for name in CASES), *((name, 1) for name in CASES)])
def test_kernel_equals_reference(name, splits, dtype):
    arguments, options = _inputs(CASES[name], dtype, seed=3)
    expected = block_attention_reference(*arguments, **options)
    actual = block_attention(*arguments, **options, splits=splits, block_m=16 if splits > 1 else None)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_what_runs_without_kernels_equals_the_reference(name):
    (q, k, v, start), options = _inputs(CASES[name], torch.float32, seed=4)
    pattern = CachePattern(start, options.pop("causal"), options.pop("window", None))
    expected = module.block_attention_reference(q, k, v, pattern, **options)
    found = module.masked_attention(q, k, v, pattern, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    k[0, 0, int(start[0])] += 1.0
    assert not torch.allclose(module.masked_attention(q, k, v, pattern, **options)[0], found[0])


def test_first_position_and_garbage_beyond_the_row():
    (q, k, v, start), options = _inputs(CASES["causal verify, grouped heads"], torch.float32, seed=5)
    start = torch.tensor([0, 60])
    expected = block_attention(q, k, v, start, **options, splits=2)
    for row, first in enumerate(start.tolist()):
        k[row, :, first + q.shape[2] :] = float("nan")
        v[row, :, first + q.shape[2] :] = float("nan")
    assert torch.equal(block_attention(q, k, v, start, **options, splits=2), expected)
    torch.testing.assert_close(block_attention_reference(q, k, v, start, **options), expected, atol=1e-5, rtol=1e-5)


def test_a_visible_key_matters_and_a_hidden_one_does_not():
    (q, k, v, _), options = _inputs(CASES["width one, sliding, odd dim"], torch.float32, seed=7)
    start = torch.tensor([100, 100, 100])
    before = block_attention(q, k, v, start, **options, splits=2)
    k[:, :, 100 - 17] += 1.0  # one position further back than the window of 17 reaches
    assert torch.equal(block_attention(q, k, v, start, **options, splits=2), before)
    k[:, :, 100 - 16] += 1.0
    assert not torch.allclose(block_attention(q, k, v, start, **options, splits=2), before)


def test_a_query_is_the_same_from_any_slot_and_beside_any_neighbour():
    (q, k, v, _), options = _inputs(CASES["causal verify, grouped heads"], torch.float32, seed=9)
    whole = block_attention(q, k, v, torch.tensor([90, 40]), **options, splits=2)
    shifted = torch.zeros_like(q)
    shifted[:, :, :3] = q[:, :, 2:]
    from_slot_two = block_attention(shifted, k, v, torch.tensor([92, 42]), **options, splits=2)
    # The interpreter's matrix product is not bitwise the same for every row of a tile; tests/gpu asserts equality.
    torch.testing.assert_close(from_slot_two[:, :, :3], whole[:, :, 2:], atol=1e-6, rtol=1e-6)
    swapped = block_attention(q.flip(0), k.flip(0), v.flip(0), torch.tensor([40, 90]), **options, splits=2)
    assert torch.equal(swapped.flip(0), whole)


def test_every_query_may_say_its_own_position():
    """As at a row's limit, where a verify's last tokens are all put on the last position."""
    (q, k, v, start), options = _inputs(CASES["causal verify, grouped heads"], torch.float32, seed=11)
    q, k, v = q[:, :2, :], k[:, :1], v[:, :1]
    positions = torch.minimum(start[:, None] + torch.arange(5), start[:, None] + torch.tensor([[2], [9]]))
    actual = block_attention(q, k, v, positions, **options, splits=2)
    torch.testing.assert_close(actual, block_attention_reference(q, k, v, positions, **options), atol=1e-5, rtol=1e-5)
    assert torch.equal(actual[1], block_attention(q, k, v, start, **options, splits=2)[1])
    assert not torch.allclose(actual[0, :, 3:], block_attention(q, k, v, start, **options, splits=2)[0, :, 3:])


def test_the_cache_may_be_longer_than_needed():
    (q, k, v, _), options = _inputs(CASES["causal verify, grouped heads"], torch.float32, seed=13)
    q, k, v = q[:, :2, :3], k[:, :1], v[:, :1]
    start = torch.tensor([60, 90])
    whole = block_attention(q, k, v, start, **options, splits=2)
    assert torch.equal(block_attention(q, k[:, :, :100], v[:, :, :100], start, **options, splits=2), whole)


TREES = {
    "tree": dict(batch=2, heads=4, kv=2, width=9, dim=64, length=200, causal=True),
    "tree of 64, more rows than a tile": dict(batch=1, heads=3, kv=1, width=64, dim=16, length=150, causal=True),
    "tree wider than its window, cap": dict(
        batch=2, heads=2, kv=1, width=13, dim=64, length=190, causal=True, window=3, softcap=20.0
    ),
    "tree, window, sinks": dict(batch=2, heads=2, kv=2, width=7, dim=32, length=99, causal=True, window=20, sinks=True),
}


def _tree(start, width, seed):
    parents = random_parents(len(start), width - 1, torch.Generator().manual_seed(seed))
    return start[:, None] + depths_of(parents), ancestors_of(parents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", TREES)
def test_trees_equal_the_reference(name, splits, dtype):
    (q, k, v, start), options = _inputs(TREES[name], dtype, seed=17)
    where, ancestors = _tree(start, q.shape[2], seed=splits)
    expected = block_attention_reference(q, k, v, where, **options, ancestors=ancestors)
    actual = block_attention(
        q, k, v, where, **options, ancestors=ancestors, splits=splits, block_m=16 if splits > 1 else None
    )
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 4])
def test_a_tree_that_is_a_chain_gives_what_a_chain_gives(splits, window):
    (q, k, v, start), options = _inputs(TREES["tree"], torch.float32, seed=19)
    where, chain = start[:, None] + torch.arange(9), ancestors_of(torch.arange(-1, 7).expand(2, -1))
    as_chain = block_attention(q, k, v, where, **options, window=window, splits=splits)
    as_tree = block_attention(q, k, v, where, **options, window=window, splits=splits, ancestors=chain)
    assert torch.equal(as_tree, as_chain)


def test_a_bit_decides_for_its_query_alone():
    (q, k, v, start), options = _inputs(TREES["tree of 64, more rows than a tile"], torch.float32, seed=23)
    where, ancestors = _tree(start, 64, seed=1)
    before = block_attention(q, k, v, where, **options, ancestors=ancestors, splits=1)
    for query, key in ((63, 63), (40, 1)):
        changed = ancestors.clone()
        changed[0, query] ^= 1 << key if key < 63 else -(1 << 63)
        after = block_attention(q, k, v, where, **options, ancestors=changed, splits=1)
        other = [i for i in range(64) if not torch.equal(after[0, :, i], before[0, :, i])]
        assert other == [query]


def test_misuse_is_named():
    (q, k, v, start), options = _inputs(CASES["causal verify, grouped heads"], torch.float32, seed=1)
    where, ancestors = _tree(start, 5, seed=0)
    with pytest.raises(ValueError, match=r"a tree needs ancestors \(int64\) and start of shape \[2, 5\], got .*\(2,\)"):
        block_attention(q, k, v, start, **options, ancestors=ancestors)
    with pytest.raises(ValueError, match="is causal, got 5 and causal=False"):
        block_attention(q, k, v, where, **{**options, "causal": False}, ancestors=ancestors)
    with pytest.raises(ValueError, match="power of two up to 32"):
        block_attention(q, k, v, start, **options, splits=3)
    with pytest.raises(ValueError, match="dtypes"):
        block_attention(q, k.half(), v, start, **options)


def test_contexts_are_shared_until_the_device_is_full():
    assert [split_count(programs, 64) for programs in (1, 3, 8, 33, 64, 5000)] == [32, 32, 16, 4, 1, 1]
    assert [split_count(programs, 16) for programs in (8, 64, 127, 128)] == [32, 8, 8, 1]
