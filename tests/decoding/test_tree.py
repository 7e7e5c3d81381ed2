"""Trees of proposals: the walk, and decoding with them, which is plain decoding."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from draftsmith.decoding.engine import Engine
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.request import Generation, Request
from draftsmith.decoding.sampling import SamplingOptions, distribution
from draftsmith.decoding.tree import Tree, along, walk
from draftsmith.decoding.verify import verify_chosen
from draftsmith.errors import DraftsmithError
from draftsmith.targets.target import Target
from tests.support.recurrent_layer import toy_hybrid
from tests.support.tiny import KINDS, tiny_target
from tests.support.tiny_draft import tiny_draft
from tests.support.tree_drafter import Nodes, TreeDrafter, decode_tree, reference_walk, two_chains
from tests.support.trees import depths_of, random_parents

VOCABULARY = 97
NEW = 30
GREEDY = SamplingOptions()
SAMPLINGS = [GREEDY, SamplingOptions(0.9), SamplingOptions(1.2, top_p=0.9, top_k=12)]


# --- the walk ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 63), st.integers(2, 5), st.booleans(), st.integers(0, 10_000))
def test_the_walk_is_the_plain_one(nodes: int, tokens: int, counted: bool, seed: int) -> None:
    """Few different tokens, so that paths are long and siblings are often equal."""
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(3, nodes, generator)
    chosen = torch.randint(tokens, (3, nodes + 1), generator=generator)
    proposed = torch.randint(tokens, (3, nodes), generator=generator)
    count = torch.randint(0, nodes + 1, (3,), generator=generator) if counted else None
    tree = Tree.of(parents)
    assert torch.equal(tree.depth, depths_of(parents))
    found = walk(chosen, proposed, tree, count)
    for row in range(3):
        offered = nodes if count is None else int(count[row])
        path = reference_walk(chosen[row].tolist(), proposed[row].tolist(), parents[row].tolist(), offered)
        assert found.verdict.count[row] == len(path)
        assert found.path[row, : len(path)].tolist() == path
        assert found.verdict.token_ids[row, : len(path)].tolist() == chosen[row, path].tolist()
        assert sorted(found.path[row].tolist()) == list(range(nodes + 1))


def test_a_chain_is_walked_as_a_chain() -> None:
    generator = torch.Generator().manual_seed(1)
    chosen, proposed = (torch.randint(2, (50, n), generator=generator) for n in (9, 8))
    for count in (None, torch.randint(0, 9, (50,), generator=generator)):
        found = walk(chosen, proposed, Tree.of(torch.arange(-1, 7).expand(50, -1)), count)
        expected = verify_chosen(chosen, proposed, count)
        assert torch.equal(found.verdict.count, expected.count)
        for row, stands in enumerate(expected.count.tolist()):
            assert torch.equal(found.verdict.token_ids[row, :stands], expected.token_ids[row, :stands])
            assert found.path[row, :stands].tolist() == list(range(stands))


def test_values_follow_the_path() -> None:
    values, path = torch.randn(2, 3, 4), torch.tensor([[0, 2, 1], [1, 0, 2]])
    assert torch.equal(along(path, values), torch.stack([values[0, path[0]], values[1, path[1]]]))
    assert torch.equal(along(path, values[..., 0]), along(path, values)[..., 0])


def test_positions_stay_in_the_window() -> None:
    tree = Tree.of(torch.tensor([[-1, -1, 0, 1, 2]]))
    assert tree.positions(torch.tensor([6]), 9).tolist() == [[6, 7, 7, 8, 8, 8]]


# --- two chains through the engine ------------------------------------------------------------------------------------


@cache
def target_of(kind: str, fuse: bool = False) -> Target:
    target = tiny_target(kind, vocab_size=VOCABULARY)
    if fuse:
        target.fuse()
    return target


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(tuple(torch.randint(VOCABULARY, (n,), generator=generator).tolist()) for n in (5, 1, 19, 12, 8))


def request(sampling: SamplingOptions = GREEDY, new: int = NEW, stop: tuple[int, ...] = ()) -> Request:
    return Request.of(prompts(), max_new_tokens=new, sampling=sampling, stop_token_ids=stop, seed=5)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def right(row: int, left: int) -> tuple[bool, int]:
    """Either chain, and 0 to 4 of its tokens."""
    return (row + left) % 2 == 1, (row * 3 + left * 7) % 5


def drafter_of(engine: Engine, answers: list[list[int]], grow: Callable[[int, list[int]], Nodes]) -> TreeDrafter:
    assert engine.drafter is not None
    return TreeDrafter(engine.drafter, answers, 8, grow)


@pytest.mark.parametrize("options", [{}, {"slots": 2, "prefill_chunk": 4, "steps_ahead": 1}], ids=str)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize(("kind", "fuse"), [*((kind, False) for kind in KINDS), ("qwen3", True), ("gemma3", True)])
def test_two_chains_give_what_plain_decoding_gives(
    kind: str, fuse: bool, sampling: SamplingOptions, options: dict[str, int]
) -> None:
    """Greedy and sampled, token by token: the draws are those of the positions, whatever is proposed."""
    target = target_of(kind, fuse)
    plain = tokens(Engine(target).decode(request(sampling)))
    engine = Engine(target, tiny_draft(target, block_size=5), EngineOptions.model_validate(options))
    drafter = drafter_of(engine, plain, two_chains(VOCABULARY, 4, right))
    found = decode_tree(engine, request(sampling), drafter)
    assert tokens(found) == plain
    for row, answer in enumerate(found):
        expected, done = [], 1
        while done < NEW:
            expected.append(min(right(row, NEW - done)[1] + 1, NEW - done))
            done += expected[-1]
        assert answer.accept_lengths == expected
    assert {1, 2, 3, 4, 5} <= {length for answer in found for length in answer.accept_lengths}


def test_random_trees_give_what_plain_decoding_gives() -> None:
    target = target_of("mistral")
    plain = tokens(Engine(target).decode(request()))
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)

        def grow(row: int, following: list[int], generator: torch.Generator = generator) -> Nodes:
            parents = random_parents(1, 8, generator)
            wanted = [following[d - 1] if d <= len(following) else 0 for d in depths_of(parents)[0, 1:].tolist()]
            wrong = (torch.rand(8, generator=generator) < 0.4).tolist()
            return [(t + 1 + i) % VOCABULARY if wrong[i] else t for i, t in enumerate(wanted)], parents[0].tolist()

        engine = Engine(target, tiny_draft(target, block_size=5))
        found = decode_tree(engine, request(), drafter_of(engine, plain, grow))
        assert tokens(found) == plain
        assert max(length for answer in found for length in answer.accept_lengths) > 2


def test_nodes_that_are_not_proposed_are_not_taken() -> None:
    target = target_of("qwen3")
    plain = tokens(Engine(target).decode(request()))
    engine = Engine(target, tiny_draft(target, block_size=5))
    drafter = drafter_of(engine, plain, two_chains(VOCABULARY, 4, lambda row, left: (False, 4)))
    drafter.counts = lambda slot: slot  # nodes 0 and 2 and 4 are the right ones
    found = decode_tree(engine, request(), drafter)
    assert tokens(found) == plain
    order = sorted(range(5), key=lambda row: -len(prompts()[row]))
    assert [max(found[row].accept_lengths) for row in order] == [1, 2, 2, 3, 3]


@pytest.mark.parametrize("stops", [False, True])
def test_a_stop_a_limit_and_the_window_cut_inside_a_path(stops: bool) -> None:
    """The window of 40 ends the longest row at 21 new tokens."""
    small = tiny_target("qwen3", vocab_size=VOCABULARY, max_position_embeddings=40)
    plain = tokens(generate(small, None, prompts(), max_new_tokens=NEW, stop_token_ids=()))
    asked = request(stop=(plain[0][4], plain[3][9]) if stops else ())
    expected = Engine(small).decode(asked)
    engine = Engine(small, tiny_draft(small, block_size=5))
    grow = two_chains(VOCABULARY, 4, lambda row, left: (row % 2 == 0, 4))
    found = decode_tree(engine, asked, drafter_of(engine, plain, grow))
    assert tokens(found) == tokens(expected)
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    assert {one.finish_reason for one in found} == ({"stop"} if stops else {"length"})
    assert len({len(one.token_ids) for one in found}) > 1


def test_what_is_kept_after_a_tree_is_what_plain_decoding_keeps() -> None:
    """Target caches and the draft's context, entry by entry; and the drafter reads the path's tokens in order."""
    target = target_of("gemma3")
    plain = tokens(Engine(target).decode(request()))
    engine = Engine(target, tiny_draft(target, block_size=5), EngineOptions(max_length=64))
    drafter = drafter_of(engine, plain, two_chains(VOCABULARY, 4, right))
    engine.drafter, drafter.engine = drafter, engine
    answers = engine.submit(request())
    while min(len(answer.token_ids) for answer in answers) < 12:
        engine.step()
    pool, occupants = engine.runner.pool, engine.scheduler.occupants
    assert pool is not None
    assert engine.draft is not None
    taps = engine.draft.config.target_layer_ids
    for answer in answers:
        slot = occupants.index(answer)
        text = [*answer.prompt, *answer.token_ids]
        known = len(text) - 1  # the last token has not been read
        ids, positions = torch.tensor([text[:known]]), torch.arange(known)[None]
        cache = target.new_cache(1, known)
        states = target.forward(ids, positions, tap_ids=taps, cache=cache)
        for kept, wanted in zip(pool.target_cache.tensors, cache.tensors, strict=True):
            torch.testing.assert_close(kept[slot, :, :known], wanted[0], rtol=1e-4, atol=2e-5)
        with torch.no_grad():
            context = engine.draft.context_keys_values(states.taps, positions)
        for layer, (keys, values) in enumerate(context):
            for part, wanted in enumerate((keys, values)):
                found = pool.draft.joint[layer, part, slot, :, :known]
                torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-4)
    by_length = [list(answer.prompt) + answer.token_ids for answer in occupants if answer is not None]
    for read, start, count in drafter.updates:
        for slot, text in enumerate(by_length):
            first, stands = int(start[slot]), int(count[slot])
            assert read[slot, :stands].tolist() == text[first : first + stands]


def test_sampled_output_has_the_targets_distribution() -> None:
    """The second token of many rows, after the first, against the target's own; the tree proposes both likely ones."""
    small = tiny_target("llama", vocab_size=7, seed=2)
    sampling = SamplingOptions(1.1)
    rows = 3000
    asked = Request.of([[3, 1, 4]] * rows, max_new_tokens=3, sampling=sampling, seed=11)

    def grow(row: int, following: list[int]) -> Nodes:
        return [1, 2, 5, 6], [-1, -1, 0, 1]

    engine = Engine(small, tiny_draft(small, block_size=3), EngineOptions(max_length=16))
    assert engine.drafter is not None
    found = decode_tree(engine, asked, TreeDrafter(engine.drafter, [[]] * rows, 4, grow))
    assert max(length for one in found for length in one.accept_lengths) == 2
    for first in range(7):
        following = [one.token_ids[1] for one in found if one.token_ids[0] == first]
        if len(following) < 200:
            continue
        p = _next(small, [3, 1, 4, first], sampling)
        observed = torch.bincount(torch.tensor(following), minlength=7).double()
        assert stats.chisquare(observed.numpy(), (p * len(following)).numpy()).pvalue > 1e-3, first
        wrong = p.roll(1)
        assert stats.chisquare(observed.numpy(), (wrong * len(following)).numpy()).pvalue < 1e-6


def _next(target: Target, text: list[int], sampling: SamplingOptions) -> Tensor:
    """The distribution of the token after a text [V] fp64."""
    final = target.forward(torch.tensor([text]), torch.arange(len(text))[None]).final_state
    assert final is not None
    p = distribution(target.ends.project(final[:, -1:]), sampling)[0, 0].double()
    return p / p.sum()


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_drawn_trees_and_recurrent_targets_are_refused() -> None:
    target = target_of("llama")
    engine = Engine(target, tiny_draft(target, block_size=5))
    drafter = drafter_of(engine, [[1]] * 5, two_chains(VOCABULARY, 4, lambda row, left: (False, 4)))
    drafted = drafter.propose

    def drawn(*arguments: object) -> object:
        proposals = drafted(*arguments)  # type: ignore[arg-type]
        return type(proposals)(proposals.token_ids, q=torch.ones(1), parents=proposals.parents)

    drafter.propose = drawn  # type: ignore[method-assign,assignment]
    with pytest.raises(DraftsmithError, match="draws a tree's tokens from a distribution; only chains may be drawn"):
        decode_tree(engine, request(), drafter)
    hybrid = toy_hybrid()
    engine = Engine(hybrid, tiny_draft(hybrid, block_size=5))
    with pytest.raises(DraftsmithError, match="which follows one path of tokens and no tree; propose a chain"):
        decode_tree(engine, request(), drafter_of(engine, [[1]] * 5, two_chains(VOCABULARY, 4, lambda *_: (False, 4))))
