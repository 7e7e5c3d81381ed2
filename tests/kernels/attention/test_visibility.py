"""The rule of visibility, spelt out key by key."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.kernels.attention.visibility import Visibility, ancestors_of
from tests.support.trees import depths_of, lineage, random_parents

PATTERNS = [(causal, window) for causal in (False, True) for window in (None, 1, 3, 9)]


@pytest.mark.parametrize(("causal", "window"), PATTERNS)
def test_a_chain_over_a_cache(causal: bool, window: int | None) -> None:
    places, length, width = torch.tensor([[0], [4], [13]]) + torch.arange(6), 20, 6
    mask = Visibility.over_cache(places, length, causal=causal, window=window).mask()
    assert mask.shape == (3, 1, width, length)
    for row, query, key in torch.cartesian_prod(torch.arange(3), torch.arange(width), torch.arange(length)).tolist():
        place, last = int(places[row, query]), int(places[row, -1])
        wanted = key <= (place if causal else last) and (window is None or abs(place - key) < window)
        assert bool(mask[row, 0, query, key]) == wanted, (row, query, key)


@pytest.mark.parametrize("window", [None, 5])
def test_tokens_on_one_place_see_what_lies_up_to_it(window: int | None) -> None:
    places = torch.tensor([[6, 7, 7, 7]])
    mask = Visibility.over_cache(places, 12, causal=True, window=window).mask()[0, 0]
    for query, place in enumerate(places[0].tolist()):
        assert mask[query].tolist() == [
            key <= place and (window is None or place - key < window) for key in range(12)
        ], query


@given(st.integers(1, 63), st.integers(0, 30), st.sampled_from([None, 1, 2, 4, 40]), st.integers(0, 10_000))
def test_a_tree_over_a_cache(nodes: int, anchor: int, window: int | None, seed: int) -> None:
    parents = random_parents(1, nodes, torch.Generator().manual_seed(seed))
    depth = depths_of(parents)
    ancestors, length = ancestors_of(parents), anchor + nodes + 3
    mask = Visibility.over_cache(anchor + depth, length, causal=True, window=window, ancestors=ancestors).mask()[0, 0]
    for query in range(nodes + 1):
        path = lineage(parents[0].tolist(), query - 1)
        at = len(path) - 1  # its depth
        wanted = [False] * length
        for key in range(anchor):
            wanted[key] = window is None or anchor + at - key < window
        for step, token in enumerate(path):
            wanted[anchor + token] = window is None or at - step < window
        assert mask[query].tolist() == wanted, query


def test_a_tree_that_is_a_chain_sees_what_a_chain_sees() -> None:
    for width in (2, 17, 64):
        chain = torch.arange(-1, width - 2).expand(3, -1)
        places = torch.tensor([[0], [7], [31]]) + torch.arange(width)
        for window in (None, 1, 6, 70):
            seen = [
                Visibility.over_cache(places, 100, causal=True, window=window, ancestors=ancestors).mask()
                for ancestors in (None, ancestors_of(chain))
            ]
            assert torch.equal(*seen)
