"""Dense block attention against a softmax written out in fp64."""

import math

import pytest
import torch
from torch import Tensor

from draftsmith.drafts.attention import AttentionInputs, AttentionKind, DenseBlockAttention
from draftsmith.errors import DraftsmithError

KIND = AttentionKind(window=None, causal=False)


def softmax_loop(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    rows, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for r in range(rows):
        for h in range(heads):
            for i in range(queries):
                weights = {
                    j: math.exp(scale * float(q[r, h, i].double() @ k[r, h // group, j].double()))
                    for j in range(k.shape[2])
                    if mask[min(r, mask.shape[0] - 1), 0, i, j]
                }
                total = sum(weights.values()) + (0.0 if sinks is None else math.exp(float(sinks[h])))
                for j, weight in weights.items():
                    out[r, h, i] += weight / total * v[r, h // group, j].double()
    return out


def case(rows: int, heads: int, kv_heads: int, context: int, slots: int, d: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    mask = torch.rand(rows, 1, slots, context + slots, generator=g) < 0.5
    mask[..., context:] |= torch.eye(slots, dtype=torch.bool)
    return {
        "q": draw(rows, heads, slots, d),
        "context_k": draw(rows, kv_heads, context, d),
        "context_v": draw(rows, kv_heads, context, d),
        "block_k": draw(rows, kv_heads, slots, d),
        "block_v": draw(rows, kv_heads, slots, d),
        "mask": mask,
        "sinks": draw(heads),
    }


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "context", "slots", "d"),
    [(1, 1, 1, 0, 1, 2), (2, 4, 2, 5, 7, 6), (3, 6, 1, 9, 3, 5), (1, 3, 3, 1, 11, 8)],
)
def test_equals_a_softmax_written_out(
    rows: int, heads: int, kv_heads: int, context: int, slots: int, d: int, with_sinks: bool
) -> None:
    c = case(rows, heads, kv_heads, context, slots, d, seed=rows * 100 + heads)
    mask, sinks = c.pop("mask"), c.pop("sinks")
    got = DenseBlockAttention({KIND: mask})(
        AttentionInputs(**c, kind=KIND, scale=0.3, sinks=sinks if with_sinks else None)
    )
    keys = torch.cat((c["context_k"], c["block_k"]), 2)
    values = torch.cat((c["context_v"], c["block_v"]), 2)
    wanted = softmax_loop(c["q"], keys, values, mask, 0.3, sinks if with_sinks else None)
    torch.testing.assert_close(got.double(), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_what_is_hidden_has_no_influence_and_what_is_visible_has(with_sinks: bool) -> None:
    c = case(2, 4, 2, 5, 3, 8, seed=1)
    mask, sinks = c.pop("mask"), c.pop("sinks") if with_sinks else None
    c.pop("sinks", None)
    mask[:, :, 1, :] = False
    mask[:, :, 1, 5 + 1] = True
    mask[:, :, 0, 2] = True
    attend = DenseBlockAttention({KIND: mask})
    before = attend(AttentionInputs(**c, kind=KIND, scale=0.5, sinks=sinks))
    changed = dict(c, context_k=c["context_k"].clone(), context_v=c["context_v"].clone())
    changed["context_k"][:, :, 2] += 1.0
    changed["context_v"][:, :, 2] -= 1.0
    after = attend(AttentionInputs(**changed, kind=KIND, scale=0.5, sinks=sinks))
    assert torch.equal(before[:, :, 1], after[:, :, 1])
    assert not torch.allclose(before[:, :, 0], after[:, :, 0])


def test_one_mask_may_serve_all_rows() -> None:
    c = case(3, 2, 2, 4, 3, 4, seed=2)
    mask = c.pop("mask")[:1]
    c.pop("sinks")
    shared = DenseBlockAttention({KIND: mask})(AttentionInputs(**c, kind=KIND, scale=0.5, sinks=None))
    spread = DenseBlockAttention({KIND: mask.expand(3, -1, -1, -1)})(
        AttentionInputs(**c, kind=KIND, scale=0.5, sinks=None)
    )
    torch.testing.assert_close(shared, spread)


def test_a_pattern_without_a_mask_is_refused() -> None:
    c = case(1, 2, 1, 2, 3, 4, seed=3)
    mask = c.pop("mask")
    c.pop("sinks")
    with pytest.raises(DraftsmithError, match=r"no attention mask.*window=4"):
        DenseBlockAttention({KIND: mask})(AttentionInputs(**c, kind=AttentionKind(4, True), scale=0.5, sinks=None))
