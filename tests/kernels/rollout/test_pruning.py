"""Exact pruning: the same token as the dense search, on inputs made to trap it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from draftsmith.kernels.rollout import low_rank_argmax as low_rank_argmax_module
from draftsmith.kernels.rollout import low_rank_pruning
from draftsmith.kernels.rollout.low_rank_argmax import low_rank_argmax, low_rank_argmax_reference, low_rank_scores
from draftsmith.kernels.rollout.low_rank_pruning import (
    Leaders,
    leaders,
    leaders_reference,
    pays,
    pruned_low_rank_argmax,
    pruned_low_rank_argmax_reference,
    widest_rank,
)
from draftsmith.kernels.rollout.row_bounds import DIRECTIONS, RowBounds, row_bounds, share_beside, upper_bounds
from draftsmith.kernels.tiling import Tiling
from draftsmith.kernels.vocabulary.keys import key_ids, key_scores, new_keys

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _smaller_groups() -> Iterator[None]:
    """So that small vocabularies have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank_pruning, "GROUP", 64)
        patch.setattr(low_rank_pruning, "LEADERS", 2)
        patch.setattr(low_rank_pruning, "FIRSTS", 8)
        yield


def ordinary(base: Tensor, weight: Tensor, latent: Tensor) -> None:
    pass


def ties(base: Tensor, weight: Tensor, latent: Tensor) -> None:
    base.mul_(0.5).round_()
    weight.round_()
    latent.round_()


def equal_rows(base: Tensor, weight: Tensor, latent: Tensor) -> None:
    weight[:] = weight[:1].sign()
    latent.round_()
    base[:] = base[:, :1].round()


def huge_norms(base: Tensor, weight: Tensor, latent: Tensor) -> None:
    weight[::3] *= 1e15
    latent *= 1e15


def tiny(base: Tensor, weight: Tensor, latent: Tensor) -> None:
    """Only products that nearly vanish tell rows apart."""
    base.zero_()
    latent *= 1e-30


def one_aligned(base: Tensor, weight: Tensor, latent: Tensor) -> None:
    """A row whose score is its bound, with a poor base."""
    weight[-1] = 3.0 * latent[0]
    base[:, -1] = -2.0


def masked(base: Tensor, weight: Tensor, latent: Tensor) -> None:
    base[:, 1::2] = float("-inf")


def no_latent(base: Tensor, weight: Tensor, latent: Tensor) -> None:
    latent.zero_()


def clear_top(base: Tensor, weight: Tensor, latent: Tensor) -> None:
    base[:, 100] = 1e4


MAKERS = [ordinary, ties, equal_rows, huge_norms, tiny, one_aligned, masked, no_latent, clear_top]


def operands(maker: object, batch: int, vocab: int, rank: int, seed: int, spread: float) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    base = 3 * torch.randn(batch, vocab, generator=generator)
    weight, latent = torch.randn(vocab, rank, generator=generator), torch.randn(batch, rank, generator=generator)
    weight *= spread
    assert callable(maker)
    maker(base, weight, latent)
    return base, weight, latent


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    maker=st.sampled_from(MAKERS),
    batch=st.integers(1, 4),
    vocab=st.integers(101, 700),
    rank=st.sampled_from([1, 7, 40]),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 1e-3, 0.1, 1.0, 30.0]),
)
def test_the_rule_never_changes_the_token(
    maker: object, batch: int, vocab: int, rank: int, seed: int, spread: float
) -> None:
    base, weight, latent = operands(maker, batch, vocab, rank, seed, spread)
    dense = low_rank_argmax_reference(base, weight, latent)
    few, bounds = leaders_reference(base).firsts, row_bounds(weight)
    assert torch.equal(pruned_low_rank_argmax_reference(base, weight, latent, bounds, few), dense)
    # Any rows may give the lower bound.
    arbitrary = torch.randint(vocab, few.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    assert torch.equal(pruned_low_rank_argmax_reference(base, weight, latent, bounds, arbitrary), dense)
    scores = low_rank_scores(base, weight, latent)
    assert not (upper_bounds(base, bounds, latent) < scores).any()


KERNEL_CASES = [(maker, 1, 347, 24) for maker in MAKERS]
KERNEL_CASES += [(ties, 3, 347, 7), (ordinary, 8, 129, 5), (ties, 17, 64, 3), (one_aligned, 5, 347, 24)]
KERNEL_CASES += [(masked, 2, 129, 5), (clear_top, 7, 347, 7), (huge_norms, 4, 347, 24)]


@pytest.mark.parametrize(("maker", "batch", "vocab", "rank"), KERNEL_CASES)
def test_the_kernel_reads_what_the_rule_leaves(maker: object, batch: int, vocab: int, rank: int) -> None:
    base, weight, latent = operands(maker, batch, vocab, rank, seed=batch, spread=0.2)
    few = leaders(base)
    assert all(torch.equal(found, wanted) for found, wanted in zip(few, leaders_reference(base), strict=True))
    pruned, dense = new_keys(batch, device=CPU), new_keys(batch, device=CPU)
    read = torch.zeros(batch, dtype=torch.int32)
    bounds = row_bounds(weight)
    pruned_low_rank_argmax(
        base, weight, latent, pruned, bounds=bounds, leaders=few, read=read, tiling=Tiling(columns=256)
    )
    low_rank_argmax(base, weight, latent, dense)
    assert torch.equal(key_ids(pruned), key_ids(dense))
    lower = low_rank_scores(base, weight, latent).gather(-1, few.firsts.long()).amax(-1, keepdim=True)
    left = (~(upper_bounds(base, bounds, latent) < lower)).sum(-1)
    assert ((read - left).abs() <= 2).all(), "but for bounds that rounding moves across the limit"
    if maker is clear_top:
        assert (read <= 2).all()
    if maker is equal_rows:
        assert (read == vocab).all()
    # Mutated: a row of W2 that should win, does, from wherever.
    if maker is not huge_norms:
        winner = vocab - 17
        weight[winner] = 1e3 * latent[0] if latent[0].any() else 1.0
        base[0, winner] = 2e4
        again = new_keys(batch, device=CPU)
        few = leaders(base)
        pruned_low_rank_argmax(
            base, weight, latent, again, bounds=row_bounds(weight), leaders=few, tiling=Tiling(columns=256)
        )
        assert int(key_ids(again)[0]) == winner


@pytest.mark.parametrize("batch", [2, 5, 11])
def test_rows_are_searched_together_as_alone(batch: int) -> None:
    """Each row's winner is another row of W2 with a poor base, which only that row is able to choose."""
    base, weight, latent = operands(ordinary, batch, 347, 24, seed=batch, spread=0.01)
    winners = torch.arange(batch) * 29 + 3
    weight[winners] = latent * (40.0 / latent.square().sum(-1, keepdim=True))
    base[:, winners] = -10.0
    bounds, few = row_bounds(weight), leaders(base)
    together, alone, read = (
        new_keys(batch, device=CPU),
        new_keys(batch, device=CPU),
        torch.zeros(batch, dtype=torch.int32),
    )
    pruned_low_rank_argmax(
        base, weight, latent, together, bounds=bounds, leaders=few, read=read, tiling=Tiling(columns=256)
    )
    for row in range(batch):
        one = slice(row, row + 1)
        pruned_low_rank_argmax(
            base[one], weight, latent[one], alone[one], bounds=bounds, leaders=few.of(one), tiling=Tiling(columns=256)
        )  # fmt: skip
    assert torch.equal(key_ids(together), winners)
    torch.testing.assert_close(key_scores(together), key_scores(alone))
    assert torch.equal(key_ids(alone), winners)
    assert (read < 60).all(), "and nearly nothing else was read for it"


def test_bounds_that_are_too_small_would_lose_the_token() -> None:
    """Mutated: what the matrix's bounds say halved, and a row whose score is nearly its bound is never read."""
    base, weight, latent = operands(ordinary, 1, 300, 40, 3, 0.01)
    base[:, 5], base[:, 101] = 12.0, -10.0
    weight[101] = latent[0] * (25.0 / latent[0].square().sum())
    few = leaders_reference(base).firsts
    right = low_rank_argmax_reference(base, weight, latent)
    assert int(key_ids(right)[0]) == 101
    assert not (few == 101).any()
    bounds = row_bounds(weight)
    halved = RowBounds(bounds.directions, bounds.along / 2, bounds.beside / 2, bounds.sizes / 2)
    wrong = pruned_low_rank_argmax_reference(base, weight, latent, halved, few)
    assert not torch.equal(wrong, right)


def strong_directions(vocab: int, rank: int, count: int, seed: int) -> Tensor:
    """A matrix with a few strong directions and a rest, as trained heads have."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    return draw(vocab, count) @ draw(count, rank) + 0.02 * draw(vocab, rank)


def test_strong_directions_leave_few_rows() -> None:
    """Where Cauchy-Schwarz on the rows themselves leaves nearly all."""
    weight, generator = strong_directions(1001, 48, 6, 0), torch.Generator().manual_seed(1)
    base = 3 * torch.randn(4, 1001, generator=generator)
    base[:, 7] = 24.0
    latent = 0.2 * torch.randn(4, 48, generator=generator)
    few = leaders_reference(base).firsts
    scores = low_rank_scores(base, weight, latent)
    lower = scores.gather(-1, few.long()).amax(-1, keepdim=True)
    left = upper_bounds(base, row_bounds(weight), latent) >= lower
    by_norms = base + latent.norm(dim=-1, keepdim=True) * weight.norm(dim=-1) >= lower
    assert left.float().mean() < 0.02
    assert by_norms.float().mean() > 0.4
    assert (scores <= upper_bounds(base, row_bounds(weight), latent)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_bounds_know_is_right(dtype: torch.dtype) -> None:
    """m and n are what the proof says they are, in fp64."""
    weight = (strong_directions(301, 23, 3, 2) * torch.logspace(-3, 3, 301)[:, None]).to(dtype)
    weight[5] = 0.0
    bounds = row_bounds(weight)
    wide, q, a = weight.double(), bounds.directions.double(), bounds.along.double()
    assert (bounds.beside.double() >= (wide - a @ q).norm(dim=-1)).all()
    assert (bounds.sizes.double() >= wide.norm(dim=-1) + a.abs() @ q.norm(dim=-1)).all()
    assert (bounds.beside < 0.2 * bounds.sizes).float().mean() > 0.9
    weight[3, 1] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        row_bounds(weight)


def test_what_the_kernel_refuses() -> None:
    base, weight, latent = operands(ordinary, 2, 130, 4, 0, 1.0)
    bounds, few = row_bounds(weight), leaders_reference(base)
    keys = new_keys(2, device=CPU)
    with pytest.raises(ValueError, match=r"along of the bounds must be contiguous \[130, 16\], got \[129, 16\]"):
        pruned_low_rank_argmax(base, weight, latent, keys, bounds=row_bounds(weight[1:]), leaders=few)
    wrong = Leaders(few.ids, few.limits, few.firsts.long())
    with pytest.raises(ValueError, match=r"firsts of the leaders must be torch.int32 \[2, 8\]"):
        pruned_low_rank_argmax(base, weight, latent, keys, bounds=bounds, leaders=wrong)
    with pytest.raises(ValueError, match="span is 96; allowed: a multiple of 64"):
        pruned_low_rank_argmax(base, weight, latent, keys, bounds=bounds, leaders=few, tiling=Tiling(columns=96))
    base, weight, latent = operands(ordinary, 2, 130, 257, 0, 1.0)
    with pytest.raises(ValueError, match=f"rows of 257 torch.float32 are too long; .* up to {widest_rank(4, CPU)}"):
        pruned_low_rank_argmax(base, weight, latent, keys, bounds=row_bounds(weight), leaders=few)


def test_where_pruning_is_expected_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a matrix larger than the cache, most of which lies along a few directions."""
    strong = strong_directions(3011, 96, 6, 0)
    squares = torch.linalg.svdvals(strong.double()).square()
    assert share_beside(strong) == pytest.approx(float(squares[DIRECTIONS:].sum() / squares.sum()), rel=1e-9)
    assert pays(strong)
    assert not pays(torch.randn(3011, 96, generator=torch.Generator().manual_seed(0))), "flat: bounds leave all rows"
    assert not pays(strong[:2011]), "read from the cache"
    monkeypatch.setattr(low_rank_pruning, "shared_memory", lambda device: 32 * 1024)
    assert not pays(strong), "its tiles do not fit"
    assert share_beside(torch.zeros(40, 30)) == 0.0


@pytest.mark.parametrize(("memory", "wide", "half"), [(99, 256, 512), (64, 256, 256), (24, 64, 128), (1, 0, 0)])
def test_what_a_device_holds(monkeypatch: pytest.MonkeyPatch, memory: int, wide: int, half: int) -> None:
    monkeypatch.setattr(low_rank_pruning, "shared_memory", lambda device: memory * 1024)
    for name, value in (("GROUP", 512), ("LEADERS", 4), ("FIRSTS", 16)):
        monkeypatch.setattr(low_rank_pruning, name, value)
    assert (widest_rank(4, CPU), widest_rank(2, CPU)) == (wide, half)


class Seen:
    """A kernel that tells with which constants it was launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.constants = kernel, {}

    def __getitem__(self, grid: Any) -> Any:
        def launch(*operands: Any, **constants: Any) -> None:
            self.constants = constants
            self.kernel[grid](*operands, **constants)

        return launch


@pytest.mark.parametrize(("rank", "height"), [(130, 32), (5, 64)])
def test_both_searches_multiply_tiles_of_one_height(monkeypatch: pytest.MonkeyPatch, rank: int, height: int) -> None:
    """Other heights would be other instructions, which may round a score's last bit differently."""
    for name, value in (("GROUP", 512), ("LEADERS", 4), ("FIRSTS", 16)):
        monkeypatch.setattr(low_rank_pruning, name, value)
    searches = Seen(low_rank_argmax_module._scan_kernel), Seen(low_rank_pruning._pruned_kernel)
    monkeypatch.setattr(low_rank_argmax_module, "_scan_kernel", searches[0])
    monkeypatch.setattr(low_rank_pruning, "_pruned_kernel", searches[1])
    base, weight, latent = operands(ordinary, 1, 83, rank, 0, 0.2)
    dense, pruned = new_keys(1, device=CPU), new_keys(1, device=CPU)
    low_rank_argmax(base, weight, latent, dense)
    pruned_low_rank_argmax(base, weight, latent, pruned, bounds=row_bounds(weight), leaders=leaders(base))
    assert torch.equal(key_ids(dense), key_ids(pruned))
    assert searches[0].constants["BLOCK_V"] == searches[1].constants["TILE"] == height


def test_a_dense_search_takes_as_many_rows_at_once_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Seen(low_rank_argmax_module._scan_kernel)
    monkeypatch.setattr(low_rank_argmax_module, "_scan_kernel", search)
    base, weight, latent = operands(ordinary, 33, 83, 60, 0, 0.2)
    found = []
    for memory, rows in ((99, 64), (40, 32), (30, 16)):
        monkeypatch.setattr(low_rank_argmax_module, "shared_memory", lambda device: memory * 1024)  # noqa: B023
        found.append(new_keys(33, device=CPU))
        low_rank_argmax(base, weight, latent, found[-1])
        assert search.constants["BLOCK_B"] == rows
        assert torch.equal(key_ids(found[-1]), key_ids(found[0]))
