from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from draftsmith.decoding.sampling import draw_token
from draftsmith.decoding.verify import Verdict, verify_chosen, verify_sampled
from tests.decoding.reference import reference_verify

Counts = list[int] | None


def random_distributions(*shape: int, seed: int, sharpness: float = 2.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * sharpness).softmax(-1)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("proposals", [1, 2, 6])
def test_chosen_equals_the_plain_loop(proposals: int, counted: bool) -> None:
    generator = torch.Generator().manual_seed(proposals)
    chosen = torch.randint(3, (200, proposals + 1), generator=generator)
    proposed = torch.randint(3, (200, proposals), generator=generator)
    count = torch.randint(proposals + 1, (200,), generator=generator) if counted else None
    verdict = verify_chosen(chosen, proposed, count)
    lengths = set()
    for row in range(200):
        expected: list[int] = []
        for slot in range(proposals if count is None else int(count[row])):
            if proposed[row, slot] != chosen[row, slot]:
                break
            expected.append(int(proposed[row, slot]))
        expected.append(int(chosen[row, len(expected)]))
        assert verdict.token_ids[row, : verdict.count[row]].tolist() == expected
        lengths.add(len(expected))
    assert {1, 2} <= lengths


def test_chosen_without_proposals_takes_the_target_token() -> None:
    verdict = verify_chosen(torch.tensor([[4], [9]]), torch.empty(2, 0, dtype=torch.int64), None)
    assert verdict.token_ids.tolist() == [[4], [9]]
    assert verdict.count.tolist() == [1, 1]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("proposals", [1, 2, 5])
def test_sampled_equals_the_plain_loop(proposals: int, counted: bool) -> None:
    rows, vocabulary = 300, 7
    generator = torch.Generator().manual_seed(proposals)
    p = random_distributions(rows, proposals + 1, vocabulary, seed=1, sharpness=1.0)
    q = random_distributions(rows, proposals, vocabulary, seed=2, sharpness=1.0)
    proposed = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(rows, proposals)
    uniform, accept = torch.rand(2, rows, proposals + 1, generator=generator, dtype=torch.float64)
    count = torch.randint(proposals + 1, (rows,), generator=generator) if counted else None
    verdict = verify_sampled(p, proposed, q, count, uniform, accept)
    lengths = set()
    for row in range(rows):
        expected = reference_verify(
            p[row].tolist(),
            proposed[row].tolist(),
            q[row].tolist(),
            proposals if count is None else int(count[row]),
            uniform[row].tolist(),
            accept[row].tolist(),
        )
        assert verdict.token_ids[row, : verdict.count[row]].tolist() == expected
        lengths.add(len(expected))
    assert lengths == set(range(1, proposals + 2))


def test_equal_distributions_accept_everything() -> None:
    p = random_distributions(500, 5, 40, seed=3)
    proposed = torch.multinomial(p[:, :4].flatten(0, 1), 1).view(500, 4)
    uniform = torch.rand(500, 5, dtype=torch.float64)
    almost_one = torch.full((500, 5), 1 - 2.0**-53, dtype=torch.float64)
    assert (verify_sampled(p, proposed, p[:, :4], None, uniform, almost_one).count == 5).all()
    # The same distributions as unequal sums of the same weights.
    assert (verify_sampled(p * 1.5, proposed, p[:, :4] * 0.75, None, uniform, almost_one * 0.999).count == 5).all()


def test_a_rejection_without_residual_mass_draws_from_p() -> None:
    # One token holds everything on both sides but for a last bit, which makes a rejection possible and a residual not.
    p = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    q = torch.tensor([[[1.0, 0.0]]])
    verdict = verify_sampled(p, torch.tensor([[0]]), q, None, torch.zeros(1, 2).double(), torch.ones(1, 2).double())
    assert verdict.token_ids[0, : verdict.count[0]].tolist() == [0]


def test_disjoint_distributions_reject_and_draw_from_p() -> None:
    p, q = torch.tensor([[[0.0, 0.5, 0.5]] * 2]), torch.tensor([[[1.0, 0.0, 0.0]]])
    for u, token in ((0.2, 1), (0.8, 2)):
        uniform = torch.full((1, 2), u, dtype=torch.float64)
        verdict = verify_sampled(p, torch.tensor([[0]]), q, None, uniform, torch.zeros(1, 2).double())
        assert verdict.token_ids[0, : verdict.count[0]].tolist() == [token]


# --- the committed tokens follow the target ---------------------------------------------------------------------------

ROWS, VOCABULARY, PROPOSALS = 60_000, 5, 2
Verify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Verdict]


def p_value(verify: Verify, *, deterministic: bool) -> float:
    """Chi-square of the first committed token and, where there are two, of the second, against p.

    The target's distributions are the same at every step, so exact enumeration is p itself.
    """
    generator = torch.Generator().manual_seed(42)
    p = random_distributions(PROPOSALS + 1, VOCABULARY, seed=5, sharpness=1.0).expand(ROWS, -1, -1)
    q = random_distributions(PROPOSALS, VOCABULARY, seed=6, sharpness=1.0).expand(ROWS, -1, -1)
    if deterministic:
        proposed = q.argmax(-1)
    else:
        proposed = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(ROWS, PROPOSALS)
    uniform, accept = torch.rand(2, ROWS, PROPOSALS + 1, generator=generator, dtype=torch.float64)
    verdict = verify(p, proposed, q, uniform, accept)
    smallest = 1.0
    for position in range(2):
        tokens = verdict.token_ids[verdict.count > position, position]
        counts = torch.bincount(tokens, minlength=VOCABULARY).double()
        expected = p[0, position].double() / p[0, position].double().sum() * counts.sum()
        smallest = min(smallest, stats.chisquare(counts.numpy(), expected.numpy(), sum_check=False).pvalue)
    return smallest


def sampled(p: Tensor, proposed: Tensor, q: Tensor, uniform: Tensor, accept: Tensor) -> Verdict:
    return verify_sampled(p, proposed, q, None, uniform, accept)


def deterministic(p: Tensor, proposed: Tensor, q: Tensor, uniform: Tensor, accept: Tensor) -> Verdict:
    return verify_chosen(draw_token(p, uniform), proposed, None)


def one_hot_q(p: Tensor, proposed: Tensor, q: Tensor, uniform: Tensor, accept: Tensor) -> Verdict:
    """Deterministic proposals as a distribution with one token: accept with p(x), else p without x."""
    return verify_sampled(p, proposed, torch.nn.functional.one_hot(proposed, VOCABULARY), None, uniform, accept)


def forgets_to_exclude(p: Tensor, proposed: Tensor, q: Tensor, uniform: Tensor, accept: Tensor) -> Verdict:
    """Mutated: on rejection it draws from p, not from what is left of p."""
    right = one_hot_q(p, proposed, q, uniform, accept)
    last = right.count[:, None] - 1
    from_p = draw_token(p, uniform).gather(1, last)
    return Verdict(right.token_ids.scatter(1, last, from_p), right.count)


def forgets_the_residual(p: Tensor, proposed: Tensor, q: Tensor, uniform: Tensor, accept: Tensor) -> Verdict:
    """Mutated: the same for proposals drawn from q."""
    right = sampled(p, proposed, q, uniform, accept)
    last = right.count[:, None] - 1
    from_p = draw_token(p, uniform).gather(1, last)
    return Verdict(right.token_ids.scatter(1, last, from_p), right.count)


def test_deterministic_proposals_follow_the_target() -> None:
    assert p_value(deterministic, deterministic=True) > 1e-3
    assert p_value(one_hot_q, deterministic=True) > 1e-3


def test_sampled_proposals_follow_the_target() -> None:
    assert p_value(sampled, deterministic=False) > 1e-3


def test_verifiers_that_forget_the_rejected_token_are_caught() -> None:
    assert p_value(forgets_to_exclude, deterministic=True) < 1e-6
    assert p_value(forgets_the_residual, deterministic=False) < 1e-6


def test_both_deterministic_rules_accept_equally_often() -> None:
    generator = torch.Generator().manual_seed(1)
    p = random_distributions(3, VOCABULARY, seed=5, sharpness=1.0).expand(ROWS, -1, -1)
    proposed = p[:, :2].argmax(-1)
    uniform, accept = torch.rand(2, ROWS, 3, generator=generator, dtype=torch.float64)
    table = [
        torch.bincount(rule(p, proposed, p, uniform, accept).count, minlength=4)[1:].tolist()
        for rule in (deterministic, one_hot_q)
    ]
    assert stats.chi2_contingency(table).pvalue > 1e-3
