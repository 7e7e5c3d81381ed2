"""Recurrent layers on a GPU: kernels against their references at real sizes, and hybrid targets through CUDA graphs."""

from typing import Any

import pytest
import torch

from draftsmith.decoding.generate import generate
from draftsmith.decoding.options import EngineOptions
from draftsmith.kernels.recurrent.kept import Pass, Standing
from draftsmith.kernels.recurrent.recurrence import KeptTokens, Tokens, recurrence, recurrence_reference
from draftsmith.kernels.recurrent.short_convolution import short_convolution, short_convolution_reference
from draftsmith.targets.target import Target
from tests.support.hybrids import MODELS, tiny_model_of
from tests.support.tiny_draft import tiny_draft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("tentative", [True, False])
@pytest.mark.parametrize("width", [1, 16, 200])
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(32, 16, 128), (5, 5, 96)])
def test_the_recurrence_is_its_reference(
    heads: int, key_heads: int, dim: int, width: int, tentative: bool, by_channel: bool
) -> None:
    if tentative and width > 16:
        pytest.skip("verifies are short")
    slots = 5
    decays = (dim,) if by_channel else ()
    tokens = Tokens(
        randn(slots, width, key_heads, dim),
        randn(slots, width, key_heads, dim),
        randn(slots, width, heads, dim),
        -torch.rand(slots, width, heads, *decays, device=CUDA),
        torch.rand(slots, width, heads, device=CUDA),
    )
    kept = KeptTokens(
        randn(slots, 2, 16, key_heads, dim),
        randn(slots, 2, 16, heads, dim),
        -torch.rand(slots, 2, 16, heads, *decays, device=CUDA),
        torch.rand(slots, 2, 16, heads, device=CUDA),
    )
    standing = Standing(torch.randint(0, 17, (slots,), device=CUDA), torch.randint(0, 2, (slots,), device=CUDA))
    state = randn(slots, heads, dim, dim, dtype=torch.float32)
    valid = None if tentative else torch.randint(0, width + 1, (slots,), device=CUDA)
    run = Pass(torch.arange(slots, device=CUDA) == 2, valid, tentative)
    twin, twin_kept = state.clone(), KeptTokens(*(t.clone() for t in kept.tensors))
    out = recurrence(state, tokens, kept, standing, run, scale=dim**-0.5, normalise=True)
    expected = recurrence_reference(twin, tokens, twin_kept, standing, run, scale=dim**-0.5, normalise=True)
    if valid is not None:
        own = torch.arange(width, device=CUDA) < valid[:, None]
        out, expected = out * own[..., None, None], expected * own[..., None, None]
    assert (out - expected).norm() <= 5e-3 * expected.norm() + 1e-6
    assert (state - twin).norm() <= 1e-3 * twin.norm()
    for found, wanted in zip(kept.tensors, twin_kept.tensors, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("tentative", "width"), [(True, 16), (True, 1), (False, 16), (False, 700)])
def test_the_short_convolution_is_its_reference(tentative: bool, width: int) -> None:
    slots, channels, taps = 5, 8192, 4
    x, weight = randn(slots, width, channels), randn(channels, taps)
    window, kept = randn(slots, 2, taps - 1, channels), randn(slots, 2, 16, channels)
    standing = Standing(torch.randint(0, 17, (slots,), device=CUDA), torch.randint(0, 2, (slots,), device=CUDA))
    valid = None if tentative else torch.randint(0, width + 1, (slots,), device=CUDA)
    run = Pass(torch.arange(slots, device=CUDA) == 2, valid, tentative)
    twins = window.clone(), kept.clone()
    out = short_convolution(x, window, kept, standing, run, weight, None, silu=True)
    expected = short_convolution_reference(x, *twins, standing, run, weight, None, silu=True)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    assert torch.equal(window, twins[0])
    assert torch.equal(kept, twins[1])


@pytest.mark.parametrize("options", [{}, {"slots": 2, "prefill_chunk": 16}])
@pytest.mark.parametrize("model_type", MODELS)
def test_graphs_give_what_eager_steps_give_and_speculation_what_plain_steps_give(
    model_type: str, options: dict[str, Any]
) -> None:
    target = Target.from_model(tiny_model_of(model_type).to(CUDA))
    draft = tiny_draft(target).to(CUDA)
    prompts = [torch.randint(97, (n,)).tolist() for n in (5, 40, 1, 23, 80)]

    def answers(draft: Any, graphs: str) -> list[list[int]]:
        chosen = EngineOptions(graphs=graphs, **options)
        found = generate(target, draft, prompts, max_new_tokens=40, stop_token_ids=(), options=chosen)
        return [one.token_ids for one in found]

    plain = answers(None, graphs="off")
    assert answers(None, graphs="on") == plain
    assert answers(draft, graphs="off") == plain
    assert answers(draft, graphs="on") == plain
