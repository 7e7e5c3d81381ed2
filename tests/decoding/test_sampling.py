import math

import pytest
import torch
from scipy import stats

from draftsmith.decoding.rng import Stream, row_seeds, uniform_pair
from draftsmith.decoding.sampling import SamplingOptions, distribution, draw_token
from draftsmith.errors import DraftsmithError
from tests.decoding.reference import reference_distribution


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 51])
@pytest.mark.parametrize("top_p", [1e-6, 0.35, 0.9, 1.0])
def test_distribution_equals_the_plain_loop(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(3, 5, 50, generator=torch.Generator().manual_seed(1)) * 3
    options = SamplingOptions(temperature, top_p, top_k)
    found = distribution(logits, options)
    assert found.dtype == torch.float32
    for row in range(3):
        for position in range(5):
            expected = torch.tensor(
                reference_distribution(logits[row, position].tolist(), options), dtype=torch.float64
            )
            assert torch.equal(found[row, position] > 0, expected > 0)
            torch.testing.assert_close(found[row, position].double(), expected, atol=1e-6, rtol=1e-5)


def test_the_order_is_top_k_then_top_p_and_both_matter() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]).log()
    kept = distribution(logits, SamplingOptions(1.0, 0.75, 2))
    # Top-p on the whole distribution would keep three (0.4 + 0.3 < 0.75).
    torch.testing.assert_close(kept, torch.tensor([4 / 7, 3 / 7, 0, 0, 0]))
    assert distribution(logits, SamplingOptions(1.0, 0.75, 0)).count_nonzero() == 3
    # Top-p on the whole distribution would keep two (0.4 < 0.5); after top-k the first alone has 4/7 >= 0.5.
    torch.testing.assert_close(distribution(logits, SamplingOptions(1.0, 0.5, 2)), torch.tensor([1.0, 0, 0, 0, 0]))
    assert distribution(logits, SamplingOptions(1.0, 0.5, 0)).count_nonzero() == 2


def test_ties_stay_together_in_top_k_and_go_by_id_in_top_p() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, -5.0])
    assert distribution(logits, SamplingOptions(1.0, 1.0, 2)).nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert distribution(torch.zeros(8), SamplingOptions(1.0, 0.5)).nonzero().flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [1e-20, 1e-38, 1e-45, 1e-320])
def test_a_tiny_temperature_takes_the_largest_logit(temperature: float) -> None:
    logits = torch.randn(7, 33, generator=torch.Generator().manual_seed(5)) * 4
    logits[2, 3:5] = 50.0
    for options in (SamplingOptions(temperature), SamplingOptions(temperature, 0.9, 5)):
        found = distribution(logits, options)
        assert found.isfinite().all()
        assert (found > 0).sum(-1).tolist() == [1, 1, 2, 1, 1, 1, 1]
        assert torch.equal(found.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e10, 1e300])
def test_a_huge_temperature_is_uniform_over_what_top_k_keeps(temperature: float) -> None:
    logits = torch.randn(3, 33, generator=torch.Generator().manual_seed(6))
    found = distribution(logits, SamplingOptions(temperature, 1.0, 4))
    kept = torch.zeros_like(logits).scatter_(-1, logits.topk(4, -1).indices, 0.25)
    torch.testing.assert_close(found, kept)


def test_bfloat16_logits_and_masked_tokens() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0]], dtype=torch.bfloat16)
    assert distribution(logits, SamplingOptions(0.5, 0.99, 2))[0, 1] == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"top_k": True}, "top_k is True"),
    ],
)
def test_options_out_of_range_are_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(DraftsmithError, match=named):
        SamplingOptions(**fields)  # type: ignore[arg-type]


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.5, 0.0, 5.5, 0.0])  # not normalised
    draws = 40_000
    uniform = uniform_pair(torch.tensor(row_seeds(5, draws)), torch.zeros(draws, dtype=torch.int64), Stream.TOKEN)[0]
    counts = torch.bincount(draw_token(weights.expand(draws, -1), uniform), minlength=8)
    assert (counts[weights == 0] == 0).all()
    expected = weights[weights > 0] / weights.sum() * draws
    assert stats.chisquare(counts[weights > 0].numpy(), expected.numpy(), sum_check=False).pvalue > 1e-3


def test_draws_at_the_edges_never_take_weightless_tokens() -> None:
    weights = torch.tensor([0.0, 0.0, 2.0, 0.0, 1.0, 0.0]).expand(3, -1)
    edges = torch.tensor([0.0, 2 / 3, 1 - 2.0**-53], dtype=torch.float64)
    assert draw_token(weights, edges).tolist() == [2, 4, 4]


def test_small_probabilities_in_a_large_vocabulary_are_not_lost() -> None:
    weights = torch.full((200_000,), 1e-9)
    weights[0] = 1.0
    total = weights.double().sum()
    just_before_the_last = ((total - 1.5e-9) / total).reshape(())
    assert draw_token(weights, just_before_the_last) == 199_998
