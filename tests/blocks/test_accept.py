import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.blocks.accept import leading_correct


def test_a_prefix_of_a_block_is_not_an_average_over_blocks() -> None:
    correct = torch.tensor([[True, True, True, True], [False, True, True, True]])
    found = leading_correct(correct, torch.ones_like(correct), torch.zeros(2, dtype=torch.int64))
    assert found.tolist() == [4, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 15), st.integers(0, 5), st.integers(0, 10_000))
def test_it_equals_counting_by_hand(labels: int, first: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    correct = torch.rand(4, labels, generator=generator) > 0.2
    mask = torch.rand(4, labels, generator=generator) > 0.1
    found = leading_correct(correct, mask, torch.full((4,), first))
    for row in range(4):
        count = 0
        while first + count < labels and correct[row, first + count] and mask[row, first + count]:
            count += 1
        assert found[row] == count
