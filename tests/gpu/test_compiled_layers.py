"""Compiled layers on the device: the same code at every number of blocks, and the gradients of plain layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from draftsmith.drafts.draft import Draft
from tests.support.tiny_draft import tiny_draft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TARGET = SimpleNamespace(hidden_size=256, num_layers=4, vocab_size=61)
FEW, MANY, BETWEEN = 40, 3001, 700
"""Numbers of blocks of 7 slots. Inductor joins the sums of a norm's backward from 5 Mi elements on: 2926 blocks."""


def gradients(draft: Draft, blocks: int) -> list[Tensor]:
    """Of every weight of the layers and of the embeddings, for random ones."""
    torch.manual_seed(blocks)
    embeddings = torch.randn(1, blocks, 7, TARGET.hidden_size, device="cuda", requires_grad=True)
    positions = torch.randint(400, (1, blocks, 1), device="cuda") + torch.arange(7, device="cuda")
    draft.zero_grad()
    # Attention is not compiled: any function of queries, keys and values will do.
    none = torch.empty(1, 2, 0, 12, device="cuda")
    contexts = [(none, none)] * len(draft.attention_kinds)

    def attend(q: Tensor, _ck: Tensor, _cv: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return q * k.repeat_interleave(2, 1) + v.repeat_interleave(2, 1)

    hidden = draft(embeddings, positions, contexts, attend)
    hidden.square().mean().backward()
    found = [parameter.grad for name, parameter in draft.named_parameters() if ".layers." in name]
    return [grad.clone() for grad in (*found, embeddings.grad) if grad is not None]


def test_no_number_of_blocks_is_compiled_for_itself() -> None:
    torch._dynamo.reset()
    draft = tiny_draft(TARGET).cuda().train()
    wanted = {blocks: gradients(draft, blocks) for blocks in (MANY, FEW, BETWEEN)}
    assert len(wanted[FEW]) == 2 * 11 + 1
    draft.backbone.fuse()
    made = []
    for blocks, plain in wanted.items():
        before = counters["stats"]["unique_graphs"]
        for found, gradient in zip(gradients(draft, blocks), plain, strict=True):
            assert (found - gradient).norm() < 1e-3 * gradient.norm()
        made.append(counters["stats"]["unique_graphs"] - before)
    assert made[0] > 0
    assert made[1:] == [0, 0]
