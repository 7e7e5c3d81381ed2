"""Rollouts by keys: the tokens of the plain rollout, sampled ones with their distribution, one truth over processes."""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftsmith.algorithms.registry import algorithm, algorithm_for
from draftsmith.algorithms.rollout import Derived, RolloutOptions
from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import RowSampling, SamplingOptions
from draftsmith.drafts.draft import Draft
from draftsmith.errors import DraftsmithError
from draftsmith.kernels.device import interpreted
from draftsmith.targets.ends import TargetEnds
from tests.support.fillers import filler_of
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

VOCAB = 96
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "domino": (
        "domino",
        {"gru_hidden_dim": 11, "emb_dim": 6, "shift_label": True, "pure_draft_prefix_len": 2},
    ),
    **{
        kind: (
            "dspark",
            {
                "markov_rank": 6,
                "markov_head_type": kind,
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
        )
        for kind in ("vanilla", "gated", "rnn")
    },
}
GREEDY = SamplingOptions()
SAMPLED = SamplingOptions(0.8)
FILTERED = SamplingOptions(1.1, top_p=0.9, top_k=7)


def make_draft(target: Any, head: str, seed: int = 0) -> Draft:
    architecture, fields = HEADS[head]
    draft = tiny_draft(target, architecture=architecture, head=fields, block_size=5, num_layers=1, seed=seed)
    with torch.no_grad():
        for parameter in draft.head.parameters():
            parameter.mul_(3.0)  # so that the correction decides tokens
    return draft


def case(head: str, rows: int, seed: int = 1) -> tuple[Draft, TargetEnds, Tensor, Tensor]:
    target = tiny_target("llama", vocab_size=VOCAB)
    draft, generator = make_draft(target, head), torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 5, draft.config.hidden_size, generator=generator)
    return draft, target.ends, hidden, torch.randint(VOCAB, (rows,), generator=generator)


def sampler(*rows: SamplingOptions, seed: int = 5) -> RowSampler:
    seeds = torch.arange(len(rows)) * 7919 + seed
    return RowSampler(RowSampling.of(rows), seeds, torch.arange(len(rows)) + 3)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "options",
    [{"rollout": "dense"}, {"rollout": "pruned"}],
    ids=["dense", "pruned"],
)
@torch.no_grad()
def test_greedy_rollouts_equal_the_plain_one(head: str, options: dict[str, Any]) -> None:
    draft, ends, hidden, anchors = case(head, 6)
    method, greedy = algorithm_for(draft.config), sampler(*[GREEDY] * 6)
    for count in (None, 3):
        plain = filler_of(method, draft, ends, count).fill(hidden, anchors, greedy)
        by_keys = filler_of(method, draft, ends, count, **options).fill(hidden, anchors, greedy)
        assert torch.equal(by_keys.token_ids, plain.token_ids)
        assert by_keys.q is None
    # Mutated: one row of W2 that should win, does.
    filler = filler_of(method, draft, ends, **options)
    weight = draft.head.output_weight if head == "domino" else draft.head.markov_head.markov_w2.weight
    weight[77] = 100.0
    weight[78] = -100.0
    changed = filler.fill(hidden, anchors, greedy)
    assert torch.equal(changed.token_ids, filler_of(method, draft, ends).fill(hidden, anchors, greedy).token_ids)
    assert ((changed.token_ids == 77) | (changed.token_ids == 78)).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "rows", "options"),
    [
        ("domino", 1, {"rollout": "dense"}),
        ("domino", 3, {"rollout": "dense", "token_table": True}),
        ("vanilla", 1, {"rollout": "pruned"}),
    ],
)
@torch.no_grad()
def test_rollouts_by_kernels_equal_the_plain_one(head: str, rows: int, options: dict[str, Any]) -> None:
    """In the interpreter; with few rows Domino's steps guess their inputs, with more they do not."""
    draft, ends, hidden, anchors = case(head, rows)
    method, greedy = algorithm_for(draft.config), sampler(*[GREEDY] * rows)
    plain = filler_of(method, draft, ends, 3).fill(hidden, anchors, greedy).token_ids
    filler = filler_of(method, draft, ends, 3, **options)
    with interpreted():
        assert torch.equal(filler.fill(hidden, anchors, greedy).token_ids, plain)
    if rows == 1:
        return
    mixed = sampler(SAMPLED, FILTERED, GREEDY)
    with interpreted():
        found = filler.fill(hidden, anchors, mixed)
    expected = filler.fill(hidden, anchors, mixed)
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.q, expected.q)


@torch.no_grad()
def test_a_token_table_changes_nothing_and_follows_its_weights() -> None:
    draft, ends, hidden, anchors = case("domino", 4)
    method, greedy = algorithm("domino"), sampler(*[GREEDY] * 4)
    filler = filler_of(method, draft, ends, rollout="dense", token_table=True)
    plain = filler_of(method, draft, ends)
    assert torch.equal(filler.fill(hidden, anchors, greedy).token_ids, plain.fill(hidden, anchors, greedy).token_ids)
    before = filler.table()
    assert filler.table() is before
    for change in (
        lambda gru: gru.weight_ih_l0.mul_(-2.0),
        lambda gru: setattr(gru, "weight_ih_l0", torch.nn.Parameter(gru.weight_ih_l0 * -3.0)),
    ):
        old = plain.fill(hidden, anchors, greedy).token_ids
        change(draft.head.prefix_gru)
        new = plain.fill(hidden, anchors, greedy).token_ids
        assert not torch.equal(old, new)
        assert torch.equal(filler.fill(hidden, anchors, greedy).token_ids, new)


def test_derived_tensors_are_made_again_for_new_weights_at_an_old_address() -> None:
    holder, made = [torch.ones(3)], []

    def make(weight: Tensor) -> Tensor:
        made.append(1)
        return weight * 2

    derived = Derived(lambda: (holder[0],), make)
    assert derived() is derived()
    holder[0].add_(1)
    assert derived()[0] == 4
    storage = holder[0]
    holder[0] = storage.view(3)  # another tensor, the same memory
    derived()
    assert len(made) == 3


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_sampled_rows_have_their_distribution(head: str) -> None:
    """Of every row by its own options; q is what the plain rollout's sampler says of the same tokens before."""
    options = (GREEDY, SAMPLED, FILTERED, SAMPLED, GREEDY)
    draft, ends, hidden, anchors = case(head, len(options))
    method = algorithm_for(draft.config)
    filler, plain = filler_of(method, draft, ends, rollout="dense"), filler_of(method, draft, ends)
    mixed = sampler(*options)
    found = filler.fill(hidden, anchors, mixed)
    assert found.q is not None

    class Told(RowSampler):
        """Answers with the tokens found, so that the plain rollout goes the same way."""

        def __call__(self, logits: Tensor, draw: int) -> tuple[Tensor, Tensor | None]:
            return found.token_ids[:, draw], super().__call__(logits, draw)[1]

    told = plain.fill(hidden, anchors, Told(mixed.sampling, mixed.seeds, mixed.anchors))
    torch.testing.assert_close(found.q, told.q)
    drawn = found.q.gather(-1, found.token_ids.unsqueeze(-1)).squeeze(-1)
    assert (drawn > 0).all()
    assert (drawn[[0, 4]] == 1).all()
    # A row's tokens do not depend on its neighbours' options, and follow its seed.
    alone = filler.fill(hidden, anchors, sampler(*[SAMPLED] * len(options)))
    assert torch.equal(alone.token_ids[[1, 3]], found.token_ids[[1, 3]])
    torch.testing.assert_close(alone.q[[1, 3]], found.q[[1, 3]])
    assert torch.equal(filler.fill(hidden, anchors, mixed).token_ids, found.token_ids)
    other = filler.fill(hidden, anchors, sampler(*options, seed=6))
    assert torch.equal(other.token_ids[[0, 4]], found.token_ids[[0, 4]])
    assert not torch.equal(other.token_ids[1:4], found.token_ids[1:4])


@torch.no_grad()
def test_draws_follow_q() -> None:
    """The first token of many rows that differ in their noise only."""
    rows = 4000
    draft, ends, hidden, anchors = case("vanilla", 1)
    for options in (SAMPLED, FILTERED):
        filler = filler_of("dspark", draft, ends, 1, rollout="dense")
        found = filler.fill(hidden.expand(rows, -1, -1), anchors.expand(rows), sampler(*[options] * rows))
        q = found.q[0, 0].double()
        count = torch.bincount(found.token_ids[:, 0], minlength=VOCAB)
        assert (count[q == 0] == 0).all()
        often = q * rows > 5
        z = (count - rows * q)[often] / (rows * q * (1 - q))[often].sqrt()
        assert z.abs().max() < 4.5
        assert z.square().mean() < 2.0


@pytest.mark.parametrize("head", ["domino", "rnn"])
def test_the_engine_generates_the_targets_own_tokens(head: str) -> None:
    target = tiny_target("llama", vocab_size=VOCAB)
    prompts = [[3, 9, 1], [7], [5, 5, 2, 8]]
    plain = generate(target, None, prompts, max_new_tokens=12)
    for rollout in ("dense", "pruned"):
        options = EngineOptions(proposer={"rollout": rollout})
        drafted = generate(target, make_draft(target, head), prompts, max_new_tokens=12, options=options)
        assert [row.token_ids for row in drafted] == [row.token_ids for row in plain]


def test_confidence_counts_as_in_the_plain_rollout() -> None:
    draft, ends, hidden, anchors = case("gated", 7)
    greedy = sampler(*[GREEDY] * 7)
    plain, dense = (
        filler_of("dspark", draft, ends, min_survival=0.4, rollout=rollout).fill(hidden, anchors, greedy)
        for rollout in ("plain", "dense")
    )
    assert torch.equal(plain.count, dense.count)
    assert len(set(plain.count.tolist())) > 1


# --- several processes ------------------------------------------------------------------------------------------------

PARALLEL = [
    ("domino", "dense", SAMPLED),
    ("domino", "pruned", GREEDY),
    ("gated", "dense", FILTERED),
    ("vanilla", "pruned", GREEDY),
]


def roll(tensor_parallel: bool) -> list[tuple[Tensor, Tensor | None]]:
    results = []
    for head, rollout, options in PARALLEL:
        draft, ends, hidden, anchors = case(head, 3)
        method = algorithm_for(draft.config)
        filler = filler_of(method, draft, ends, rollout=rollout, tensor_parallel=tensor_parallel)
        with torch.no_grad():
            found = filler.fill(hidden, anchors, sampler(*[options] * 3))
        results.append((found.token_ids, found.q))
    return results


def work(rank: int, world: int, directory: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/meet-{world}", rank=rank, world_size=world
    )
    try:
        shared = roll(tensor_parallel=True)
        torch.save(shared, directory / f"{world}-{rank}.pt")
        if rank == 1:  # by itself, while the others are done: nothing may wait for them
            by_itself = roll(tensor_parallel=False)
            assert all(torch.equal(one[0], other[0]) for one, other in zip(shared, by_itself, strict=True))
    finally:
        torch.distributed.destroy_process_group()


def test_two_and_four_processes_equal_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # the modules are there already
    alone = roll(tensor_parallel=False)
    for world in (2, 4):
        processes = [context.Process(target=work, args=(rank, world, tmp_path)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
        for rank in range(world):
            for (tokens, q), (own, own_q) in zip(alone, torch.load(tmp_path / f"{world}-{rank}.pt"), strict=True):
                assert torch.equal(tokens, own)
                assert (q is None and own_q is None) or torch.equal(q, own_q)


def test_what_rollouts_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    domino, ends, _, _ = case("domino", 1)
    dspark = make_draft(tiny_target("llama", vocab_size=VOCAB), "gated")

    def refuse(match: str, draft: Draft = domino, target_ends: TargetEnds = ends, **options: Any) -> None:
        with pytest.raises(DraftsmithError, match=match):
            filler_of(algorithm_for(draft.config), draft, target_ends, **options)

    refuse("rollout", rollout="fast")
    refuse("unknown field 'token_tabel'.*token_table", token_tabel=True)
    refuse("unknown field 'token_table' in the decoding options of dspark", dspark, token_table=True)
    refuse("token_table is True, and the rollout is 'plain'", token_table=True)
    more = tiny_target("llama", vocab_size=VOCAB + 4).ends
    for draft in (domino, dspark):
        refuse(r"logits of 96 tokens \(vocab_size\).*has 100; both must be the same", draft, more)
        elsewhere = TargetEnds(ends.embedding_weight.to("meta"), ends.head_weight.to("meta"))
        refuse("put both on one device", draft, elsewhere)
    broken = make_draft(tiny_target("llama", vocab_size=VOCAB), "vanilla")
    with torch.no_grad():
        broken.head.markov_head.markov_w2.weight[3, 1] = float("nan")
    refuse("output matrix of dspark's correction holds numbers that are not finite", broken)
    wide = TargetEnds(ends.embedding_weight, ends.head_weight.double())
    refuse("target's output head is in torch.float64; rollouts run in", target_ends=wide)
    for draft in (domino, dspark):
        refuse("tensor_parallel is True for .*, and this process belongs to no group", draft, tensor_parallel=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 5)
    for draft in (domino, dspark):
        refuse("5 processes cannot share a vocabulary of 96 tokens evenly", draft, tensor_parallel=True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    refuse("rollout 'plain' works on the whole vocabulary", rollout="plain", tensor_parallel=True)


@pytest.mark.parametrize("rollout", ["auto", "dense", "pruned"])
def test_without_triton_no_rollout_by_kernels_is_chosen(rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("draftsmith.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    weight = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(DraftsmithError, match=f"rollout '{rollout}' needs the package triton"):
        RolloutOptions(rollout=rollout, tensor_parallel=True).resolve("domino", weight)
    assert RolloutOptions().resolve("domino", weight) == "plain"
