"""Trees on a device: the attention kernel, passes over a tree, and steps that graphs hold."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.algorithms.drafter import AnyDrafter, Proposals, Sampler
from draftsmith.decoding.engine import Engine
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.kernels.attention.visibility import ancestors_of
from draftsmith.targets.target import Target, TargetStates
from tests.support.tiny import KINDS, tiny_model
from tests.support.tiny_draft import tiny_draft
from tests.support.trees import depths_of, lineage, random_parents

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "window", "dim"), [(32, None, 128), (64, None, 64), (17, 5, 96), (64, 300, 128)])
def test_the_kernel_equals_its_reference(dtype: torch.dtype, width: int, window: int | None, dim: int) -> None:
    from draftsmith.kernels.attention.block_attention import block_attention, block_attention_reference
    from draftsmith.kernels.attention.visibility import CachePattern

    generator = torch.Generator("cuda").manual_seed(width)
    options = {"device": "cuda", "generator": generator}
    q = torch.randn(3, width, 8, dim, **options).to(dtype).transpose(1, 2)
    k, v = (torch.randn(3, 2, 1500, dim, **options).to(dtype) for _ in range(2))
    parents = random_parents(3, width - 1, torch.Generator().manual_seed(width))
    start = torch.tensor([[3], [700], [1400]])
    where, ancestors = (start + depths_of(parents)).cuda(), ancestors_of(parents).cuda()
    scale, tree = dim**-0.5, CachePattern(where, True, window, ancestors)
    found = block_attention(q, k, v, tree, scale=scale)
    expected = block_attention_reference(q, k, v, tree, scale=scale)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    chain, line = (start + torch.arange(width)).cuda(), ancestors_of(torch.arange(-1, width - 2).expand(3, -1)).cuda()
    as_tree = block_attention(q, k, v, CachePattern(chain, True, window, line), scale=scale)
    assert torch.equal(as_tree, block_attention(q, k, v, CachePattern(chain, True, window), scale=scale))
    assert not torch.equal(as_tree, found)


def target_of(kind: str, fuse: bool, vocab_size: int = 97) -> Target:
    target = Target.from_model(tiny_model(kind, vocab_size=vocab_size, hidden_size=256, initializer_range=0.06).cuda())
    if fuse:
        target.fuse()
    return target


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "own modules"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_its_path_and_what_stands_is_kept(kind: str, fuse: bool) -> None:
    target = target_of(kind, fuse)
    parents = random_parents(2, 11, torch.Generator().manual_seed(3))
    text, tokens = torch.randint(97, (2, 21)), torch.randint(97, (2, 11))
    cache = target.new_cache(2, 60)
    positions = torch.arange(20, device="cuda").expand(2, -1)
    target.forward(text[:, :20].cuda(), positions, cache=cache)
    ids = torch.cat((text[:, 20:], tokens), dim=1).cuda()
    where = (20 + depths_of(parents)).cuda()
    states = target.forward(ids, where, cache=cache, ancestors=ancestors_of(parents).cuda(), tentative=True)
    lines = [lineage(parents[row].tolist(), 10) for row in range(2)]

    def plain(row: int, path: list[int], more: Tensor) -> Tensor:
        whole = torch.cat((text[row, :20], ids[row, path].cpu(), more)).cuda()
        return target.forward(whole[None], torch.arange(len(whole), device="cuda")[None]).final_state[0]

    for row in range(2):
        for node in range(11):
            expected = plain(row, lineage(parents[row].tolist(), node), text[0, :0])[-1]
            torch.testing.assert_close(states.final_state[row, node + 1], expected, rtol=1e-3, atol=1e-3)
    longest = max(map(len, lines))
    path = torch.tensor([line + [0] * (longest - len(line)) for line in lines], device="cuda")
    count = torch.tensor([len(line) for line in lines], device="cuda")
    cache.keep(count, 20 + path)
    further = torch.randint(97, (2, 3))
    following = (20 + count)[:, None] + torch.arange(3, device="cuda")
    found = target.forward(further.cuda(), following, cache=cache).final_state
    for row in range(2):
        torch.testing.assert_close(found[row], plain(row, lines[row], further[row])[-3:], rtol=1e-3, atol=1e-3)


class Table:
    """Proposes, after every token, the same tree of tokens: by a look-up on the device, so that graphs can hold it."""

    def __init__(self, inner: AnyDrafter, vocab_size: int, parents: Sequence[int]) -> None:
        self.inner, self.parents = inner, torch.tensor(parents, device="cuda")
        generator = torch.Generator().manual_seed(1)
        table = torch.stack([torch.randperm(vocab_size, generator=generator)[:2] for _ in range(vocab_size)])
        self.table = table.repeat(1, len(parents) // 2).cuda()

    width = property(lambda self: len(self.parents) + 1)
    reach = property(lambda self: max(self.width, self.inner.reach))
    wants = property(lambda self: self.inner.wants)

    def new_state(self, slots: int, length: int) -> Any:
        return self.inner.new_state(slots, length)

    def read(self, state: Any, ids: Tensor, states: TargetStates, start: Tensor, valid: Tensor) -> None:
        self.inner.read(state, ids, states, start, valid)

    def update(self, state: Any, ids: Tensor, states: TargetStates, start: Tensor, count: Tensor) -> None:
        self.inner.update(state, ids, states, start, count)

    def propose(self, state: Any, anchors: Tensor, anchor_ids: Tensor, extent: int, sampler: Sampler) -> Proposals:
        return Proposals(self.table[anchor_ids], parents=self.parents.expand(len(anchors), -1))


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("sampling", [SamplingOptions(), SamplingOptions(0.9, top_k=3)], ids=["greedy", "sampled"])
def test_decoding_with_trees_is_plain_decoding(sampling: SamplingOptions, graphs: str) -> None:
    target = target_of("qwen3", True, vocab_size=4)
    prompts = [[1, 2, 3], [0], [3, 1] * 9, [2, 2, 0, 1, 3]]
    asked = Request.of(prompts, max_new_tokens=40, sampling=sampling, seed=4)
    plain = Engine(target).decode(asked)
    engine = Engine(target, tiny_draft(target, block_size=5, head_dim=64).cuda(), EngineOptions(graphs=graphs))
    assert engine.drafter is not None
    engine.drafter = Table(engine.drafter, 4, [-1, -1, 0, 0, 1, 1])
    for _ in range(2):  # the second time from graphs alone
        found = engine.decode(asked)
        assert tokens(found) == tokens(plain)
    lengths = {length for one in found for length in one.accept_lengths}
    assert {1, 2, 3} <= lengths


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]
