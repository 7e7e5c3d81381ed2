"""Kernels of sequential heads on a device: against references in fp64, in all dtypes, at odd sizes."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from draftsmith.algorithms.rollout import RolloutOptions
from draftsmith.kernels.device import cache_bytes
from draftsmith.kernels.rollout import input_gates as inputs
from draftsmith.kernels.rollout import prefix_gru
from draftsmith.kernels.rollout.low_rank_argmax import (
    Draw,
    low_rank_argmax,
    low_rank_sample,
    low_rank_sample_reference,
)
from draftsmith.kernels.rollout.low_rank_pruning import (
    leaders,
    leaders_reference,
    pruned_low_rank_argmax,
    widest_rank,
)
from draftsmith.kernels.rollout.row_bounds import row_bounds
from draftsmith.kernels.vocabulary.few_states import few_states_logits
from draftsmith.kernels.vocabulary.keys import key_ids, key_scores, new_keys, pack_keys
from draftsmith.kernels.vocabulary.noise import gumbel_noise

pytestmark = pytest.mark.gpu

DTYPES = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
BATCHES = [1, 3, 8, 33]
# Every batch with one size, the other sizes with one batch: a product in fp32 of long rows takes minutes to compile.
SEARCHES = [
    (dtype, *sizes)
    for dtype in (torch.bfloat16, torch.float16)
    for sizes in (*((batch, 20011, 256) for batch in BATCHES), (3, 5000, 130), (3, 3001, 300))
]
SEARCHES += [(torch.float32, *sizes) for sizes in (*((b, 1003, 24) for b in BATCHES), (1, 5000, 130), (1, 3001, 300))]
DEVICE = torch.device("cuda")


def operands(batch: int, vocab: int, rank: int, dtype: torch.dtype, scale: float = 0.3) -> tuple[Tensor, ...]:
    base = (3 * torch.randn(batch, vocab, device=DEVICE)).to(dtype)
    weight = (scale * torch.randn(vocab, rank, device=DEVICE)).to(dtype)
    return base, weight, torch.randn(batch, rank, device=DEVICE).to(dtype)


def exact_scores(base: Tensor, weight: Tensor, latent: Tensor) -> Tensor:
    return base.double() + latent.double() @ weight.double().T


def check_best(keys: Tensor, exact: Tensor) -> None:
    """The chosen token is best but for fp32 rounding, and its score is right."""
    ids = key_ids(keys)
    chosen = exact.gather(-1, ids[:, None])[:, 0]
    tolerance = 2e-5 * exact.abs().amax(-1)
    assert (exact.amax(-1) - chosen <= tolerance).all()
    assert ((key_scores(keys).double() - chosen).abs() <= tolerance).all()


@pytest.mark.parametrize(("dtype", "batch", "vocab", "rank"), SEARCHES)
def test_search(dtype: torch.dtype, batch: int, vocab: int, rank: int) -> None:
    base, weight, latent = operands(batch, vocab, rank, dtype)
    keys, backwards = (new_keys(batch, device=DEVICE) for _ in range(2))
    low_rank_argmax(base, weight, latent, keys, first_id=7)
    check_best(keys, torch.nn.functional.pad(exact_scores(base, weight, latent), (7, 0), value=-1e30))
    low_rank_argmax(base, weight, latent, backwards, first_id=7, reverse=True)
    assert torch.equal(keys, backwards)
    few = leaders(base)
    assert all(torch.equal(found, wanted) for found, wanted in zip(few, leaders_reference(base), strict=True))
    if rank > widest_rank(weight.element_size(), DEVICE):
        with pytest.raises(ValueError, match="are too long; on this device"):
            pruned_low_rank_argmax(base, weight, latent, keys, bounds=row_bounds(weight), leaders=few)
        return
    pruned, read = new_keys(batch, device=DEVICE), torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    bounds = row_bounds(weight)
    pruned_low_rank_argmax(base, weight, latent, pruned, bounds=bounds, leaders=few, first_id=7, read=read)
    assert torch.equal(keys, pruned), "scores and tokens agree bit for bit"
    assert (read >= 1).all()
    # Mutated: one row of W2 that should win, does.
    winner = vocab - 1
    weight[winner] = 50.0 * latent[0]
    for search in (
        lambda out: low_rank_argmax(base, weight, latent, out),
        lambda out: pruned_low_rank_argmax(base, weight, latent, out, bounds=row_bounds(weight), leaders=few),
    ):
        out = new_keys(batch, device=DEVICE)
        search(out)
        assert int(key_ids(out)[0]) == winner


def test_the_rollout_that_is_chosen() -> None:
    """A matrix most of which lies along a few directions is pruned, a flat one is not, nor one that the cache holds."""
    rows = 1 + cache_bytes(DEVICE) // 200
    flat = torch.randn(rows, 100, device=DEVICE)
    strong = 0.1 * flat + torch.randn(rows, 5, device=DEVICE) @ torch.randn(5, 100, device=DEVICE)
    options = RolloutOptions()
    assert options.resolve("domino", strong.bfloat16()) == "pruned"
    assert options.resolve("domino", strong[1:].bfloat16()) == "dense"
    assert options.resolve("domino", flat.bfloat16()) == "dense"
    assert options.resolve("domino", strong.cpu()) == "plain"


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_from_a_table_and_no_correction(dtype: torch.dtype) -> None:
    base, weight, table = operands(3, 1003, 24, dtype)
    table = torch.randn(1003, 24, device=DEVICE).to(dtype)
    ids = torch.tensor([5, 1002, 0], device=DEVICE)
    previous = pack_keys(torch.zeros(3, device=DEVICE), ids)
    wanted, gathered, pruned, plain = (new_keys(3, device=DEVICE) for _ in range(4))
    low_rank_argmax(base, weight, table[ids].contiguous(), wanted)
    low_rank_argmax(base, weight, table, gathered, previous=previous)
    few = leaders(base)
    pruned_low_rank_argmax(base, weight, table, pruned, bounds=row_bounds(weight), leaders=few, previous=previous)
    assert torch.equal(wanted, gathered)
    assert torch.equal(wanted, pruned)
    low_rank_argmax(base, None, None, plain)
    assert torch.equal(key_ids(plain), base.float().argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_sampling(dtype: torch.dtype, batch: int) -> None:
    base, weight, latent = operands(batch, 20011, 256 if dtype != torch.float32 else 24, dtype)
    temperature = torch.rand(batch, device=DEVICE) + 0.5
    temperature[batch // 2] = 0.0
    seeds = torch.randint(2**62, (batch,), device=DEVICE)
    positions = torch.randint(2**31, (batch,), device=DEVICE)
    keys, scores = new_keys(batch, device=DEVICE), torch.full((batch, 20011), float("nan"), device=DEVICE)
    low_rank_sample(base, weight, latent, keys, scores, Draw(temperature, seeds, positions, 3))
    noise = gumbel_noise(seeds, positions, 3, 20011)
    expected, _ = low_rank_sample_reference(base, weight, latent, noise, temperature)
    assert torch.equal(key_ids(keys), key_ids(expected))
    exact = exact_scores(base, weight, latent)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-4)
    other = new_keys(batch, device=DEVICE)
    low_rank_sample(base, weight, latent, other, scores, Draw(temperature, seeds, positions, 4))
    assert not torch.equal(keys, other) or batch == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "width", "hidden"), [*((batch, 1024, 4096) for batch in BATCHES), (3, 40, 72), (8, 192, 576)]
)
def test_prefix_gru(dtype: torch.dtype, batch: int, width: int, hidden: int) -> None:
    rank = 20
    embedding = torch.randn(99, hidden, device=DEVICE).to(dtype)
    weight_ih = (torch.randn(3 * width, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
    weight_hh = (torch.randn(3 * width, width, device=DEVICE) * width**-0.5).to(dtype)
    whole = (torch.randn(rank, hidden + width, device=DEVICE) * width**-0.5).to(dtype)
    state, ids = torch.randn(batch, width, device=DEVICE).to(dtype), torch.randint(99, (batch,), device=DEVICE)
    from_hidden = torch.randn(batch, 3, rank, device=DEVICE).to(dtype)[:, 1]
    keys, gates_h = pack_keys(torch.zeros(batch, device=DEVICE), ids), state.float() @ weight_hh.float().T
    rest = (gates_h, state, from_hidden, whole[:, hidden:], weight_hh)
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    close = dict(rtol=tolerance, atol=tolerance)

    gates_i = inputs.input_gates(keys, embedding, weight_ih)
    reference = inputs.input_gates_reference(ids, embedding, weight_ih)
    torch.testing.assert_close(gates_i.sum(0), reference[0], rtol=1e-4, atol=1e-4)
    expected = prefix_gru.advance_reference(reference, *rest)
    for found, wanted in zip(prefix_gru.advance(gates_i, *rest), expected, strict=True):
        torch.testing.assert_close(found, wanted, **close)
    table = inputs.token_table(embedding, weight_ih)
    from_table = prefix_gru.advance(table, *rest, previous=keys)
    for found, wanted in zip(from_table, expected, strict=True):
        torch.testing.assert_close(found, wanted, **close)
    other = prefix_gru.advance(table, *rest, previous=pack_keys(torch.zeros(batch, device=DEVICE), (ids + 1) % 99))
    assert not any(torch.equal(found, wanted) for found, wanted in zip(other, from_table, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "vocab", "inner"), [*((count, 20011, 576) for count in BATCHES), (3, 1003, 72)])
def test_few_states(dtype: torch.dtype, count: int, vocab: int, inner: int) -> None:
    states = torch.randn(count, inner, device=DEVICE).to(dtype)
    head = (torch.randn(vocab, inner, device=DEVICE) * inner**-0.5).to(dtype)
    found, exact = few_states_logits(states, head), states.double() @ head.double().T
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    head[vocab - 1] += 1.0
    changed = few_states_logits(states, head)
    assert not torch.equal(changed[:, -1], found[:, -1])
    assert torch.equal(changed[:, :-1], found[:, :-1])
