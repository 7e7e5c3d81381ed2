"""DFlash 2's candidates and the greedy path through them, against plain PyTorch and against the plain filler."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from draftsmith.algorithms.dflash2_path import DFlash2Filler
from draftsmith.algorithms.dflash2_rollout import KernelDFlash2Filler
from draftsmith.decoding.sampler import RowSampler
from draftsmith.decoding.sampling import SamplingOptions
from draftsmith.kernels.rollout.candidate_path import (
    candidate_path,
    candidate_path_reference,
    fits,
    top_candidates,
    top_candidates_reference,
)
from draftsmith.kernels.vocabulary.keys import key_ids
from tests.support.fillers import filler_of
from tests.support.tiny import tiny_target
from tests.support.tiny_draft import tiny_draft

VOCAB = 1300  # more than one group of tokens, the last not whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("vocab", "count"), [(VOCAB, 16), (512, 7), (513, 1), (40, 40), (1100, 21)])
def test_candidates(vocab: int, count: int, dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    found = top_candidates(logits, count)
    assert torch.equal(found, top_candidates_reference(logits, count))
    assert torch.equal(logits.gather(-1, key_ids(found)), logits.topk(count, dim=-1).values)
    if count < vocab:
        weakest = key_ids(found[1, 2, -1])
        logits[1, 2, weakest] = -9.0
        assert weakest not in key_ids(top_candidates(logits, count)[1, 2])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([-2.0, -0.0, 0.0, 1.5]), min_size=6, max_size=600), st.integers(1, 6))
def test_equal_logits_go_to_the_lowest_ids(values: list[float], count: int) -> None:
    logits = torch.tensor(values)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    assert key_ids(top_candidates(logits[None], count))[0].tolist() == order[:count]


def operands(batch: int, steps: int, count: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(batch + 7 * rank)
    candidates = top_candidates(torch.randn(batch, steps, VOCAB).to(dtype), count)
    projected, anchor_ids = torch.randn(batch, steps, rank).to(dtype), torch.randint(VOCAB, (batch,))
    predecessor, successor = torch.randn(2, VOCAB, rank).to(dtype)
    return candidates, anchor_ids, projected, predecessor, successor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("batch", "steps", "count", "rank"), [(3, 6, 16, 24), (1, 15, 7, 256), (5, 1, 1, 3), (2, 4, 33, 5)]
)
def test_the_path(batch: int, steps: int, count: int, rank: int, dtype: torch.dtype) -> None:
    given_ = operands(batch, steps, count, rank, dtype)
    found = candidate_path(*given_)
    assert torch.equal(found, candidate_path_reference(*given_))
    assert (found.unsqueeze(-1) == key_ids(given_[0])).any(-1).all()
    if count > 1:
        assert not torch.equal(found, key_ids(given_[0])[..., 0]), "the codebooks matter"
        if steps > 1:  # a step follows from the token before it
            other = (*given_[:3], -given_[3], given_[4])
            assert not torch.equal(candidate_path(*other), found)


def test_equal_scores_go_to_the_lowest_id() -> None:
    candidates = top_candidates(torch.zeros(1, 2, VOCAB), 9)
    zeros = torch.zeros(VOCAB, 4)
    path = candidate_path(candidates, torch.tensor([5]), torch.zeros(1, 2, 4), zeros, zeros)
    assert path.tolist() == [[0, 0]]


def test_operands_that_do_not_fit_are_refused() -> None:
    candidates, anchors, projected, predecessor, successor = operands(2, 3, 5, 4, torch.float32)
    with pytest.raises(ValueError, match="count is 0"):
        top_candidates(torch.zeros(2, 9), 0)
    with pytest.raises(ValueError, match="1 to 9"):
        top_candidates(torch.zeros(2, 9), 10)
    with pytest.raises(ValueError, match="contiguous"):
        top_candidates(torch.zeros(9, 2).T, 1)
    with pytest.raises(ValueError, match="projected"):
        candidate_path(candidates, anchors, projected[:, :2], predecessor, successor)
    with pytest.raises(ValueError, match="agree"):
        candidate_path(candidates, anchors, projected.half(), predecessor, successor)
    with pytest.raises(ValueError, match="contiguous"):
        candidate_path(candidates, anchors, projected, predecessor, successor.T.contiguous().T)
    assert [fits(*sizes) for sizes in ((65, 4), (64, 512), (64, 256), (16, 1024))] == [False, False, True, True]


@torch.no_grad()
@pytest.mark.parametrize("sampling", [SamplingOptions(), SamplingOptions(0.9, top_p=0.9, top_k=5)], ids=str)
def test_the_proposer_with_kernels_is_the_plain_one(sampling: SamplingOptions) -> None:
    target = tiny_target("llama", vocab_size=VOCAB)
    head = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 7}
    draft = tiny_draft(target, block_size=6, architecture="dflash2", head=head)
    draft.head.candidate_selector.successor_codebook.mul_(4.0)
    plain = filler_of("dflash2", draft, target.ends, 4)
    assert isinstance(plain, DFlash2Filler)
    kernels = KernelDFlash2Filler(plain.draft, plain.ends, plain.layout, plain.num_proposals)
    hidden, anchors = torch.randn(3, 6, target.hidden_size), torch.randint(VOCAB, (3,))
    sampler = RowSampler(sampling, torch.arange(3), torch.arange(3) + 9)
    expected, found = (filler.fill(hidden, anchors, sampler) for filler in (plain, kernels))
    assert found.token_ids.shape == (3, 4)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert (found.q is None) == (expected.q is None) == sampling.greedy
    if found.q is not None and expected.q is not None:
        torch.testing.assert_close(found.q, expected.q)
    changed = replace(kernels, num_proposals=2).fill(hidden.flip(0), anchors, sampler)
    assert not torch.equal(changed.token_ids, found.token_ids[:, :2])
