"""A pass over a tree of tokens: each sees what it would see at the end of its own path, and what stands of the tree is
kept as if it had been a chain."""

import pytest
import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.kernels.attention.visibility import ancestors_of
from draftsmith.targets.target import Target
from tests.support.tiny import KINDS, tiny_target
from tests.support.trees import depths_of, lineage, random_parents

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
VOCAB = 97
LENGTHS = (13, 4, 9)
"""Tokens of each row before the tree's first; windows of 8 (Mistral, Gemma 3) are shorter."""


class Rows:
    """Ragged rows in a cache, and a random tree for each; the tree's first token is the last of the row's text."""

    def __init__(self, target: Target, nodes: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target = target
        self.texts = [torch.randint(VOCAB, (n + 1,), generator=generator) for n in LENGTHS]
        self.tokens = torch.randint(VOCAB, (3, nodes), generator=generator)
        self.parents = random_parents(3, nodes, generator)
        self.anchors = torch.tensor(LENGTHS)
        self.cache = target.new_cache(3, 48, nodes + 1)
        width = max(LENGTHS)
        ids = torch.stack([torch.nn.functional.pad(text[:-1], (0, width - len(text) + 1)) for text in self.texts])
        target.forward(ids, torch.arange(width).expand(3, -1), cache=self.cache, valid=self.anchors)

    def verify(self, ancestors: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """The states of the tree's tokens, the anchor's first: [3, nodes + 1, H]."""
        ids = torch.cat((torch.stack([text[-1:] for text in self.texts]), self.tokens), dim=1)
        positions = self.anchors[:, None] + depths_of(self.parents)
        ancestors = ancestors_of(self.parents) if ancestors is None else ancestors
        states = self.target.forward(
            ids, positions, cache=self.cache, ancestors=ancestors, places=places, tentative=True
        )
        assert states.final_state is not None
        return states.final_state

    def path(self, row: int, node: int) -> Tensor:
        """A row's text and then the tokens from the anchor down to a node (-1: the anchor alone)."""
        below = lineage(self.parents[row].tolist(), node)[1:]
        return torch.cat((self.texts[row], self.tokens[row, [token - 1 for token in below]]))

    def plain(self, text: Tensor) -> Tensor:
        """The final states of a text without a cache [length, H]."""
        return self.target.forward(text[None], torch.arange(len(text))[None]).final_state[0]


@pytest.fixture(params=["own code", "fused"])
def fuse(request: pytest.FixtureRequest) -> bool:
    return request.param == "fused"


def target_of(kind: str, fuse: bool) -> Target:
    target = tiny_target(kind, vocab_size=VOCAB)
    if fuse:
        target.fuse()
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_its_own_path(kind: str, fuse: bool) -> None:
    rows = Rows(target_of(kind, fuse), 9, seed=len(kind))
    states = rows.verify()
    for row in range(3):
        for node in range(-1, 9):
            torch.testing.assert_close(states[row, node + 1], rows.plain(rows.path(row, node))[-1], **CLOSE)


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_what_stands_is_kept_as_a_chain(kind: str, fuse: bool) -> None:
    rows = Rows(target_of(kind, fuse), 9, seed=5)
    rows.verify()
    nodes = [8, 3, -1]  # to which each row's path goes
    tokens = [lineage(rows.parents[row].tolist(), node) for row, node in enumerate(nodes)]
    longest = max(map(len, tokens))
    path = torch.tensor([line + [0] * (longest - len(line)) for line in tokens])
    count = torch.tensor([len(line) for line in tokens])
    rows.cache.keep(count, rows.anchors[:, None] + path)
    further = torch.randint(VOCAB, (3, 4))
    positions = (rows.anchors + count)[:, None] + torch.arange(4)
    found = rows.target.forward(further, positions, cache=rows.cache).final_state
    for row, node in enumerate(nodes):
        text = torch.cat((rows.path(row, node), further[row]))
        torch.testing.assert_close(found[row], rows.plain(text)[-4:], **CLOSE)


def test_without_keeping_the_tree_stays(fuse: bool) -> None:
    """So that the test above sees what `keep` does."""
    rows = Rows(target_of("qwen3", fuse), 9, seed=5)
    rows.verify()
    line = lineage(rows.parents[0].tolist(), 8)
    assert line != list(range(len(line)))
    position = rows.anchors[:, None] + len(line)
    found = rows.target.forward(torch.full((3, 1), 7), position, cache=rows.cache).final_state
    text = torch.cat((rows.path(0, 8), torch.tensor([7])))
    assert not torch.allclose(found[0, -1], rows.plain(text)[-1], atol=1e-3)


def test_a_chain_as_a_tree_is_a_chain(fuse: bool) -> None:
    rows = Rows(target_of("gemma3", fuse), 9, seed=2)
    rows.parents = torch.arange(-1, 8).expand(3, -1)
    as_tree = rows.verify()
    ids = torch.cat((torch.stack([text[-1:] for text in rows.texts]), rows.tokens), dim=1)
    positions = rows.anchors[:, None] + torch.arange(10)
    as_chain = rows.target.forward(ids, positions, cache=rows.cache).final_state
    assert torch.equal(as_tree, as_chain)


def test_a_bit_too_many_shows(fuse: bool) -> None:
    rows = Rows(target_of("qwen3", fuse), 6, seed=3)
    before, changed = rows.verify(), ancestors_of(rows.parents)
    node = next(i for i in range(1, 7) if not changed[1, i] & 2 and i > 1)
    changed[1, node] |= 2
    after = rows.verify(changed)
    assert not torch.allclose(after[1, node], before[1, node], atol=1e-4)
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]])


def test_entries_go_where_they_are_told(fuse: bool) -> None:
    """A chain whose entries lie further on than their positions: who is seen goes by places. The first seven tokens of
    a window of 8 see what lies before, which is not the text's."""
    target = tiny_target("mistral", num_layers=1)
    if fuse:
        target.fuse()
    text, positions = torch.randint(VOCAB, (1, 20)), torch.arange(20)[None]
    cache = target.new_cache(1, 40)
    places = positions + 11
    states = [
        target.forward(text[:, low:high], positions[:, low:high], cache=cache, places=places[:, low:high]).final_state
        for low, high in ((0, 9), (9, 20))
    ]
    found, expected = torch.cat(states, dim=1)[0], target.forward(text, positions).final_state[0]
    torch.testing.assert_close(found[7:], expected[7:], **CLOSE)
    assert ((found - expected).abs().amax(-1) > 1e-3).tolist() == [True] * 7 + [False] * 13
    keys, values = cache.layers[0].tensors
    assert (keys[:, :, :11] == 0).all()
    assert (values[:, :, 31:] == 0).all()


def test_trees_that_cannot_be() -> None:
    target = tiny_target("llama")
    ids = torch.zeros(1, 65, dtype=torch.int64)
    with pytest.raises(DraftsmithError, match="a tree of 65 tokens in one pass; allowed are at most 64"):
        target.forward(ids, ids, cache=target.new_cache(1, 80), ancestors=ids)
    with pytest.raises(DraftsmithError, match="are for passes over a cache"):
        target.forward(ids, ids, valid=ids[:, 0])
