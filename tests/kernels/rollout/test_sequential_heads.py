"""Kernels of sequential heads, in the interpreter, against plain references."""

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

pytest.importorskip("triton")

from draftsmith.kernels.rollout import input_gates as inputs
from draftsmith.kernels.rollout import prefix_gru
from draftsmith.kernels.rollout.low_rank_argmax import (
    Draw,
    low_rank_argmax,
    low_rank_argmax_reference,
    low_rank_sample,
    low_rank_sample_reference,
    low_rank_scores,
)
from draftsmith.kernels.vocabulary.keys import LOWEST_KEY, key_ids, key_scores, new_keys, pack_keys
from draftsmith.kernels.vocabulary.noise import gumbel_from_words, gumbel_noise

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16]


def operands(batch: int, vocab: int, rank: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, vocab), (vocab, rank), (batch, rank))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


# --- keys -------------------------------------------------------------------------------------------------------------


SMALL = inputs.TILING._replace(splits=2, depth=16)


def test_keys_order_as_scores_do_and_hold_them() -> None:
    scores = torch.tensor([float("-inf"), -3e38, -2.5, -1e-45, -0.0, 0.0, 1e-45, 0.1, 3e38, float("inf")])
    ids = torch.arange(10) + 2**31  # ids above 2^31 fit
    keys = pack_keys(scores, ids)
    assert (keys > LOWEST_KEY).all()
    assert torch.equal(key_ids(keys), ids)
    assert torch.equal(key_scores(keys), scores)
    for i in range(10):
        for j in range(10):
            if scores[i] > scores[j]:
                assert keys[i] > keys[j]
            elif scores[i] == scores[j]:  # -0 equals 0
                assert (keys[i] > keys[j]) == (i < j)


def test_the_largest_key_is_the_first_maximum() -> None:
    scores = torch.randint(-3, 4, (200, 30)).float()
    assert torch.equal(key_ids(pack_keys(scores, torch.arange(30)).amax(-1)), scores.argmax(-1))


# --- search -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "vocab", "rank"), [(1, 203, 24), (3, 65, 16), (8, 130, 7), (33, 203, 33)])
def test_argmax_equals_the_reference(dtype: torch.dtype, batch: int, vocab: int, rank: int) -> None:
    base, weight, latent = operands(batch, vocab, rank, dtype, seed=batch)
    keys, backwards = new_keys(batch, device=CPU), new_keys(batch, device=CPU)
    low_rank_argmax(base, weight, latent, keys, first_id=5)
    low_rank_argmax(base, weight, latent, backwards, first_id=5, reverse=True)
    expected = low_rank_argmax_reference(base, weight, latent, first_id=5)
    assert torch.equal(key_ids(keys), key_ids(expected))
    assert torch.equal(keys, backwards)
    torch.testing.assert_close(key_scores(keys), low_rank_scores(base, weight, latent).amax(-1))
    # Mutated: one row of W2 that should win, does.
    weight[vocab - 1] = 100.0 * latent[0]
    low_rank_argmax(base, weight, latent, keys)
    assert int(key_ids(keys)[0]) == vocab - 1


def test_ties_go_to_the_lowest_id_whatever_the_order_of_tiles() -> None:
    base, weight, latent = operands(2, 300, 20)
    base[:], weight[:] = 0.0, weight.round()
    latent = latent.round()
    weight[[17, 150, 299]] = 10.0 * latent[0].sign()
    for reverse in (False, True):
        keys = new_keys(2, device=CPU)
        low_rank_argmax(base, weight, latent, keys, reverse=reverse)
        assert torch.equal(key_ids(keys), low_rank_scores(base, weight, latent).argmax(-1))
        assert int(key_ids(keys)[0]) == 17


def test_latents_from_a_table_and_no_correction() -> None:
    base, weight, _ = operands(3, 203, 24)
    table, ids = torch.randn(203, 24), torch.tensor([202, 0, 9])
    gathered, plain = new_keys(3, device=CPU), new_keys(3, device=CPU)
    low_rank_argmax(base, weight, table, gathered, previous=pack_keys(torch.zeros(3), ids))
    assert torch.equal(key_ids(gathered), low_rank_scores(base, weight, table[ids]).argmax(-1))
    low_rank_argmax(base, None, None, plain)
    assert torch.equal(key_ids(plain), base.argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3, 8, 33])
def test_sampling_equals_the_reference(dtype: torch.dtype, batch: int) -> None:
    base, weight, latent = operands(batch, 203, 24, dtype)

    def cycle(*values: float) -> Tensor:
        return torch.tensor(values).repeat(batch)[:batch]

    temperature = cycle(0.6, 0.0, 1.0, 1e-38, 2.5)
    seeds, positions = cycle(0, 2**62 + 5, 7, -3, 9), cycle(0, 2**32 - 1, 5, 6, 7)
    keys, scores = new_keys(batch, device=CPU), torch.empty(batch, 203)
    draw = Draw(temperature, seeds, positions, 2)
    low_rank_sample(base, weight, latent, keys, scores, draw)
    noise = gumbel_noise(seeds, positions, 2, 203)
    expected, expected_scores = low_rank_sample_reference(base, weight, latent, noise, temperature)
    assert torch.equal(key_ids(keys), key_ids(expected))
    torch.testing.assert_close(scores, expected_scores)
    cold = temperature < 1e-30
    assert torch.equal(key_ids(keys)[cold], scores.argmax(-1)[cold]), "greedy, and nearly so"
    # A part of the vocabulary takes the noise of its own ids.
    part = new_keys(batch, device=CPU)
    low_rank_sample(base[:, 100:], weight[100:], latent, part, scores[:, 100:], draw, first_id=100)
    inside = key_ids(keys) >= 100
    assert torch.equal(key_ids(keys)[inside], key_ids(part)[inside])
    assert (part[~inside] < keys[~inside]).all()


def test_draws_follow_the_softmax() -> None:
    rows, vocab = 20_000, 12
    scores = torch.linspace(-6, 2, vocab).expand(rows, -1)
    noise = gumbel_noise(torch.arange(rows) * 7919, torch.full((rows,), 3), 1, vocab)
    found = torch.bincount((scores + noise).argmax(-1), minlength=vocab)
    expected = scores[0].double().softmax(-1) * rows
    assert stats.chisquare(found.numpy(), expected.numpy()).pvalue > 1e-3
    other = gumbel_noise(torch.arange(rows) * 7919, torch.full((rows,), 3), 2, vocab)
    assert ((scores + other).argmax(-1) != (scores + noise).argmax(-1)).float().mean() > 0.3


def test_noise_is_right_at_both_ends() -> None:
    high, low = torch.tensor([0, 0, 2**28, 2**32 - 1]), torch.tensor([0, 1, 5, 2**32 - 1])
    u = (high.double() + (low.double() + 0.5) / 2**32) / 2**32
    expected = -torch.log(-torch.log1p(-u[:3]))
    torch.testing.assert_close(gumbel_from_words(high, low)[:3].double(), expected, rtol=1e-6, atol=1e-6)
    assert gumbel_from_words(high, low).isfinite().all()


# --- the prefix GRU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "hidden", "width", "rank"), [(1, 72, 40, 20), (3, 33, 17, 5), (8, 40, 19, 3), (33, 24, 8, 9)]
)
def test_prefix_step(dtype: torch.dtype, batch: int, hidden: int, width: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(width)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    embedding, weight_ih, weight_hh = draw(99, hidden), 0.2 * draw(3 * width, hidden), 0.2 * draw(3 * width, width)
    whole, from_hidden, state = 0.3 * draw(rank, hidden + width), draw(batch, 3, rank)[:, 1], draw(batch, width)
    ids = torch.randint(99, (batch,), generator=generator)
    keys, gates_h = pack_keys(torch.zeros(batch), ids), state.float() @ weight_hh.float().T
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-3, "atol": 3e-3}
    rest = (gates_h, state, from_hidden, whole[:, hidden:], weight_hh)

    gates_i = inputs.input_gates(
        keys, embedding, weight_ih, scale=1.5, tiling=inputs.TILING._replace(splits=3, depth=16)
    )
    reference = inputs.input_gates_reference(ids, embedding, weight_ih, 1.5)
    torch.testing.assert_close(gates_i.sum(0), reference[0], **close)
    expected = prefix_gru.advance_reference(reference, *rest)
    for found, wanted in zip(prefix_gru.advance(gates_i, *rest), expected, strict=True):
        torch.testing.assert_close(found, wanted, **close)
    table = inputs.token_table(embedding, weight_ih, 1.5, chunk=10)
    for found, wanted in zip(prefix_gru.advance(table, *rest, previous=keys), expected, strict=True):
        torch.testing.assert_close(found, wanted, **close)

    # What PyTorch's own GRU and the published formula say, in fp32.
    wide = [t.float() for t in (embedding[ids] * 1.5, state, weight_ih, weight_hh)]
    new = torch.gru_cell(*wide)
    torch.testing.assert_close(expected[0].float(), new, **close)
    zeros = torch.zeros(batch, hidden)
    latent = nn.functional.silu(from_hidden.float() + torch.cat((zeros, new), -1) @ whole.float().T)
    torch.testing.assert_close(expected[1].float(), latent, **close)
    # Mutated: another token gives another state, latent and next gates.
    other = prefix_gru.advance(table, *rest, previous=pack_keys(torch.zeros(batch), (ids + 1) % 99))
    assert not any(torch.equal(found, wanted) for found, wanted in zip(other, expected, strict=True))


@pytest.mark.parametrize("batch", [1, 3])
def test_guesses_change_nothing(batch: int) -> None:
    """Right ones, wrong ones, and both in one batch."""
    generator = torch.Generator().manual_seed(batch)
    embedding, weight = torch.randn(50, 33, generator=generator), torch.randn(21, 33, generator=generator)
    ids = torch.randint(50, (batch,), generator=generator)
    plain = inputs.input_gates(pack_keys(torch.zeros(batch), ids), embedding, weight, tiling=SMALL).sum(0)
    guesses = torch.stack([ids + 1, ids + 2, ids], dim=1) % 50  # the last one is right
    known = embedding[guesses] @ weight.T
    for wrong in range(batch + 1):
        guesses[:wrong, 2] = 49 - ids[:wrong] + (ids[:wrong] > 24).long()  # another token than the row's
        known[:wrong] = embedding[guesses[:wrong]] @ weight.T
        keys = pack_keys(torch.zeros(batch), ids)
        found = inputs.input_gates(keys, embedding, weight, tiling=SMALL, guesses=(guesses, known))
        torch.testing.assert_close(found.sum(0), plain, rtol=1e-5, atol=1e-5)
    # Mutated: what a right guess says is taken, not computed.
    guesses[0, 1], known[0, 1] = ids[0], 7.0
    found = inputs.input_gates(keys, embedding, weight, tiling=SMALL, guesses=(guesses, known)).sum(0)
    assert (found[0] == 7.0).all()
    torch.testing.assert_close(found[1:], plain[1:], rtol=1e-5, atol=1e-5)


def test_operands_that_do_not_fit_are_named() -> None:
    base, weight, latent = operands(2, 20, 4)
    keys = new_keys(2, device=CPU)
    for match, arguments in (
        ("do not fit base", (base[:, :19].contiguous(), weight, latent, keys)),
        ("both must be one of", (base, weight, latent.half(), keys)),
        ("go together", (base, weight, None, keys)),
        ("keys must be contiguous", (base, weight, latent, keys[:1])),
        ("2000 is too wide", (base, torch.zeros(20, 2000), torch.zeros(2, 2000), keys)),
        ("contiguous rows", (base.T.contiguous().T, weight, latent, keys)),
    ):
        with pytest.raises(ValueError, match=match):
            low_rank_argmax(*arguments)
