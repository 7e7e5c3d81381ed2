import pytest
import torch
from scipy import stats

from draftsmith.decoding.rng import Stream, philox, row_seeds, uniform_pair
from draftsmith.errors import DraftsmithError

# Known answers of Philox 4x32-10, from the reference implementation's published test vectors (Random123).
KNOWN = [
    ([0x00000000] * 4, [0x00000000] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    c, k = [torch.tensor(word) for word in counter], [torch.tensor(word) for word in key]
    words = philox((c[0], c[1], c[2], c[3]), (k[0], k[1]))
    assert [int(word) for word in words] == expected


def uniforms(rows: int = 50, positions: int = 2000) -> torch.Tensor:
    """[rows, positions, 2]"""
    seeds = torch.tensor(row_seeds(7, rows))
    return torch.stack(uniform_pair(seeds[:, None], torch.arange(positions), Stream.TOKEN), dim=-1)


def test_numbers_are_uniform() -> None:
    numbers = uniforms()
    assert numbers.dtype == torch.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for which in range(2):
        assert stats.kstest(numbers[..., which].flatten().numpy(), "uniform").pvalue > 1e-3


def independent(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Chi-square of the 16 x 16 table of two series against independent uniform numbers."""
    cells = (first * 16).long() * 16 + (second * 16).long()
    return stats.chisquare(torch.bincount(cells.flatten(), minlength=256).numpy()).pvalue > 1e-3


def test_rows_positions_pairs_streams_and_draws_are_independent() -> None:
    numbers = uniforms()
    assert independent(numbers[..., 0], numbers[..., 1])
    assert independent(numbers[:-1, :, 0], numbers[1:, :, 0])
    assert independent(numbers[:, :-1, 0], numbers[:, 1:, 0])
    seeds, positions = torch.arange(300)[:, None], torch.arange(300)  # neighbouring seeds as they are
    token = uniform_pair(seeds, positions, Stream.TOKEN)[0]
    assert independent(token[:-1], token[1:])
    assert independent(token, uniform_pair(seeds, positions, Stream.PROPOSAL)[0])
    assert independent(token, uniform_pair(seeds, positions, Stream.TOKEN, draw=1)[0])
    assert not independent(token, token.clone())


def test_numbers_depend_on_every_part_of_the_key_and_on_nothing_else() -> None:
    seeds, positions = torch.tensor(row_seeds(3, 5)), torch.tensor([0, 1, 2, 1000, 4_000_000_000])
    base = uniform_pair(seeds, positions, Stream.TOKEN, 4)[0]
    assert torch.equal(base, uniform_pair(seeds, positions, Stream.TOKEN, 4)[0])
    alone = [uniform_pair(seeds[i : i + 1], positions[i : i + 1], Stream.TOKEN, 4)[0] for i in range(5)]
    assert torch.equal(base, torch.cat(alone))
    for other in (
        uniform_pair(seeds ^ 1, positions, Stream.TOKEN, 4)[0],
        uniform_pair(seeds ^ (1 << 40), positions, Stream.TOKEN, 4)[0],
        uniform_pair(seeds, positions ^ 1, Stream.TOKEN, 4)[0],
        uniform_pair(seeds, positions, Stream.PROPOSAL, 4)[0],
        uniform_pair(seeds, positions, Stream.TOKEN, 5)[0],
    ):
        assert (base != other).all()


def test_row_seeds_belong_to_seed_and_index() -> None:
    assert row_seeds(11, 6)[:4] == row_seeds(11, 4)
    assert len({*row_seeds(11, 500), *row_seeds(12, 500)}) == 1000
    assert all(0 <= seed < 2**63 for seed in row_seeds(2**63 - 1, 500))
    assert row_seeds(1 << 40, 3) != row_seeds(0, 3)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True])
def test_row_seeds_refuse_what_is_no_seed(seed: object) -> None:
    with pytest.raises(DraftsmithError, match="seed is"):
        row_seeds(seed, 2)  # type: ignore[arg-type]
