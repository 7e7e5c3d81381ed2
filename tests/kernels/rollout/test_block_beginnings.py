"""What a block begins with, in the interpreter: the head times a few states, keys, and the best tokens by base."""

import pytest
import torch

pytest.importorskip("triton")

from draftsmith.kernels.rollout import low_rank_pruning
from draftsmith.kernels.rollout.block_keys import begin_keys, begin_keys_reference, block_tokens, block_tokens_reference
from draftsmith.kernels.rollout.low_rank_pruning import leaders, leaders_reference
from draftsmith.kernels.vocabulary.few_states import few_states_logits, few_states_reference
from draftsmith.kernels.vocabulary.keys import LOWEST_KEY, pack_keys, token_keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("count", "vocabulary", "inner"), [(1, 65, 33), (3, 130, 256), (8, 7, 96), (33, 203, 40)])
def test_few_states(dtype: torch.dtype, count: int, vocabulary: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(count)
    states = torch.randn(1, count, inner, generator=generator).to(dtype)
    wide = (torch.randn(vocabulary, inner + 9, generator=generator) * inner**-0.5).to(dtype)
    head = wide[:, :inner]  # rows of a wider matrix
    found, wanted = few_states_logits(states, head), few_states_reference(states, head)
    assert found.shape == (1, count, vocabulary)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    # Mutated: the head's last row.
    wide[-1] += 1
    changed = few_states_logits(states, head)
    assert not torch.equal(changed[..., -1], found[..., -1])
    assert torch.equal(changed[..., :-1], found[..., :-1])


def test_states_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"states \(2, 4\) torch.float32, head \(9, 5\)"):
        few_states_logits(torch.zeros(2, 4), torch.zeros(9, 5))
    with pytest.raises(ValueError, match=r"head \(9, 4\) torch\.float16"):
        few_states_logits(torch.zeros(2, 4), torch.zeros(9, 4).half())


@pytest.mark.parametrize(("batch", "steps"), [(1, 15), (3, 1), (8, 5), (33, 9)])
def test_keys_of_a_block(batch: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    anchors = torch.randint(2**32, (2 * batch,), generator=generator)[::2]  # not contiguous
    keys = begin_keys(anchors, steps)
    assert torch.equal(keys, begin_keys_reference(anchors, steps))
    assert torch.equal(keys[0], pack_keys(torch.zeros(1), anchors))
    assert torch.equal(keys[0], token_keys(anchors))
    assert (keys[1:] == LOWEST_KEY).all()
    tokens = torch.randint(2**32, (batch, steps), generator=generator)
    keys[1:] = pack_keys(torch.randn(batch, steps, generator=generator), tokens).T
    assert torch.equal(block_tokens(keys), tokens)
    assert torch.equal(block_tokens_reference(keys), tokens)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 64), (8, 65), (33, 150)])
def test_leaders_are_the_best_of_their_groups(rows: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank_pruning, "GROUP", 64)
    base = torch.randint(-9, 9, (rows, vocab), generator=torch.Generator().manual_seed(vocab)).half()  # many ties
    base[0, ::5] = float("-inf")
    found = leaders(base)
    assert all(torch.equal(one, other) for one, other in zip(found, leaders_reference(base), strict=True))
    # In words: sorted by base, ties to the lower id, and the last of a group that has too few again and again.
    for row in range(rows):
        groups = [
            sorted(range(first, min(first + 64, vocab)), key=lambda token: (-float(base[row, token]), token))
            for first in range(0, vocab, 64)
        ]
        wanted = [(group + [group[-1]] * 4)[:4] if len(group) < 4 else group[:4] for group in groups]
        assert found.ids[row].tolist() == [token for group in wanted for token in group]
        tops = sorted((group[0] for group in groups), key=lambda token: (-float(base[row, token]), token))
        assert found.firsts[row].tolist() == (tops + [tops[0]] * 16)[:16]
        limits = [pack_keys(base[row, group[-1]].float(), torch.tensor(group[-1])) for group in wanted]
        assert found.limits[row].tolist() == [int(limit) for limit in limits]
